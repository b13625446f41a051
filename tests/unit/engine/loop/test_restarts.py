"""How often a part is restarted, and after which pause."""

from asyncrl.engine.loop.restarts import LONGEST_PAUSE_S, Restarts


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_pauses_double_until_the_budget_is_used_up_and_the_window_gives_it_back() -> None:
    clock = Clock()
    restarts = Restarts(3, window_s=100.0, pause_s=1.0, now=clock)
    assert [restarts.take() for _ in range(3)] == [1.0, 2.0, 4.0]
    assert restarts.used_up
    clock.now = 99.0
    assert restarts.used_up
    clock.now = 100.0
    assert (restarts.used_up, restarts.count, restarts.take()) == (False, 0, 1.0)


def test_no_pause_is_longer_than_a_minute() -> None:
    restarts = Restarts(1000, window_s=1e6, pause_s=1.0, now=Clock())
    assert max(restarts.take() for _ in range(1000)) == LONGEST_PAUSE_S


def test_a_budget_of_0_is_used_up_at_once() -> None:
    assert Restarts(0, window_s=1.0, pause_s=1.0, now=Clock()).used_up
