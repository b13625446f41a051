"""The limit of requests in flight: up by one while the engine takes them, down by a factor when its cache is full."""

from asyncrl.collectors.engines.in_flight import InFlightLimit, Pressure

CALM = Pressure(cache_used=0.5, waiting=0, preemptions=0)
FULL = Pressure(cache_used=0.96, waiting=0, preemptions=0)


def test_an_engine_that_is_never_pressed_is_never_held_back() -> None:
    limit = InFlightLimit(64)
    assert not any(limit.observe(CALM, in_flight=64, now=float(second)) for second in range(100))
    assert limit.limit == 64


def test_a_full_cache_cuts_once_per_hold_and_then_the_limit_grows_by_one_per_window() -> None:
    limit = InFlightLimit(64)
    seen = []
    for eighth in range(27):
        limit.observe(FULL if eighth <= 16 else CALM, in_flight=limit.limit, now=eighth / 8)
        seen.append(limit.limit)
    assert seen == [*[51] * 16, 40, *range(41, 51)]


def test_a_preemption_cuts_whatever_the_cache_says_and_only_once() -> None:
    limit = InFlightLimit(10)
    preempted = Pressure(cache_used=0.5, waiting=0, preemptions=3)
    assert limit.observe(preempted, in_flight=10, now=0.0)
    assert not limit.observe(preempted, in_flight=6, now=5.0)
    assert limit.limit == 8


def test_the_limit_does_not_grow_while_requests_wait_in_the_engine_or_fewer_are_asked_for() -> None:
    limit = InFlightLimit(10)
    limit.observe(FULL, in_flight=10, now=0.0)
    limit.observe(Pressure(0.5, waiting=1, preemptions=0), in_flight=8, now=10.0)
    limit.observe(CALM, in_flight=7, now=20.0)
    assert limit.limit == 8


def test_at_least_one_request_is_let_through() -> None:
    limit = InFlightLimit(4)
    for second in range(0, 100, 2):
        limit.observe(FULL, in_flight=limit.limit, now=float(second))
    assert limit.limit == 1
