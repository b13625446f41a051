"""Decode batches as they are worked out from a log, by hand."""

from collections.abc import Callable

import pytest

from asyncrl.configs import RunConfig
from asyncrl.engine.events.types import Acknowledged, AnyEvent, Dispatched, Published, PublishStarted, Put
from asyncrl.engine.simulate.decoding import (
    decode_batches,
    groups_at_once,
    is_batched,
    may_be_batched,
    publish_seconds,
)
from asyncrl.engine.simulate.observed import Observed
from asyncrl.filters.testing import make_group

Small = Callable[..., RunConfig]


def granted(t: float, *groups: int) -> list[AnyEvent]:
    return [Dispatched(t=t, group=n, prompt=n, dataset="d", size=2, collector="c") for n in groups]


def done(t: float, *groups: int) -> list[AnyEvent]:
    return [
        Put(t=t, group=n, keys=[], tags=dict(make_group([0.0, 1.0], group=n, version=0, prompt_tokens=3).tags))
        for n in groups
    ]


def published(began: float, loaded: float) -> list[AnyEvent]:
    return [
        PublishStarted(t=began, version=1),
        Acknowledged(t=loaded, generator="c", version=1),
        Published(t=loaded, version=1, seconds=loaded - began),
    ]


def seen(config: RunConfig, *parts: list[AnyEvent]) -> Observed:
    observed = Observed(config)
    for event in sorted((event for part in parts for event in part), key=lambda event: event.t):
        observed.apply(event)
    return observed


def test_a_generator_takes_what_waits_and_loads_weights_between_two_batches(small: Small) -> None:
    """Two at a time: groups 0 and 1 decode from 1 to 3; weights, there at 2, load until 3.5; then 2 and 3; then 4."""
    observed = seen(
        small(),
        granted(1.0, 0, 1, 2, 3, 4),
        done(3.0, 0, 1),
        published(2.0, 3.5),
        done(5.5, 2, 3),
        done(6.0, 4),
    )
    batches = decode_batches(observed, at_once=2)
    assert [(batch.start_t, batch.end_t, batch.groups) for batch in batches] == [
        (1.0, 3.0, (0, 1)),
        (3.5, 5.5, (2, 3)),
        (5.5, 6.0, (4,)),
    ]
    assert publish_seconds(observed, batches) == [pytest.approx(0.5)]


def test_weights_that_load_beside_decoding_take_nothing_of_a_batch(small: Small) -> None:
    observed = seen(small(), granted(1.0, 0, 1, 2), done(3.0, 0, 1), published(2.0, 3.5), done(5.5, 2))
    batches = decode_batches(observed, at_once=2, beside=True)
    assert [(batch.start_t, batch.end_t) for batch in batches] == [(1.0, 3.0), (3.0, 5.5)]


def test_a_publish_takes_what_its_parts_take_where_they_are_known(small: Small) -> None:
    """The rest is waiting, for generation beside."""
    known: list[AnyEvent] = [
        PublishStarted(t=2.0, version=1),
        Published(t=3.5, version=1, seconds=1.5, gather_s=0.125, transfer_s=0.25, stage_s=0.0625, pause_s=0.0625),
    ]
    assert seen(small(), known, published(4.0, 5.25)).overheads["publish"] == [0.5, 1.25]


def test_weights_that_come_when_nothing_decodes_take_what_they_take(small: Small) -> None:
    observed = seen(small(), granted(1.0, 0), done(3.0, 0), published(4.0, 4.25))
    assert publish_seconds(observed, decode_batches(observed, at_once=2)) == [pytest.approx(0.25)]


def test_groups_in_order_and_together_are_batches_and_others_are_not(small: Small) -> None:
    in_turn = [
        [*granted(10.0 * i, 2 * i, 2 * i + 1), *done(10.0 * i + 2, 2 * i), *done(10.0 * i + 2.01, 2 * i + 1)]
        for i in range(9)
    ]
    crossed = [
        [*granted(10.0 * i, 2 * i, 2 * i + 1), *done(10.0 * i + 1, 2 * i), *done(10.0 * i + 14, 2 * i + 1)]
        for i in range(9)
    ]
    assert is_batched(seen(small(), *in_turn), at_once=2)
    assert not is_batched(seen(small(), *crossed), at_once=2)


def test_a_decode_batch_has_as_many_groups_as_fit_and_at_staleness_zero_those_granted_together(small: Small) -> None:
    size = {"rollout__group_size": 4}
    assert groups_at_once(small(**size, collector__decode_samples=12)) == 3
    assert groups_at_once(small(**size, rollout__max_staleness=0)) == 4
    assert groups_at_once(small(**size, rollout__max_staleness=0, collector__engine="batch")) == 1


def test_groups_wait_for_a_batch_only_where_they_fill_the_rows(small: Small) -> None:
    """48 samples are out at staleness 2, and 16 at 0."""
    size = {"rollout__group_size": 4, "rollout__max_staleness": 2}
    assert may_be_batched(small(**size, collector__decode_samples=48))
    assert not may_be_batched(small(**size, collector__decode_samples=49))
    assert not may_be_batched(small(**size, collector__decode_samples=48, collector__count=2))
    assert may_be_batched(small(**size, collector__engine="batch"))
