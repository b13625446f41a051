"""Which collector gets the next group: by what is in flight and how long it takes, as the log says."""

from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest

from asyncrl.engine.events.types import AnyEvent, Dispatched, GroupFailed, Put, Settled
from asyncrl.engine.loop.balance import TRIED_AGAIN_AFTER, Balance
from asyncrl.engine.testing.fakes import FakeGenerator
from asyncrl.engine.testing.simulation import Outcome, simulate, simulated_config


class Desk:
    """A balance, fed with events by hand; `t` is the log's time."""

    def __init__(self, *names: str, exact: bool = False) -> None:
        self.balance = Balance(names, exact=exact)
        self.t = 0.0
        self.groups = 0

    def tell(self, event: AnyEvent) -> None:
        self.balance.apply(msgspec.structs.replace(event, t=self.t))

    def grant(self, count: int = 1) -> list[str]:
        chosen = []
        for _ in range(count):
            chosen.append(self.balance.choose())
            self.tell(Dispatched(group=self.groups, prompt=0, dataset="d", seed=0, size=2, collector=chosen[-1]))
            self.groups += 1
        return chosen

    def arrive(self, *groups: int) -> None:
        for group in groups:
            self.tell(Put(group=group, keys=[], tags={}))


def test_without_anything_known_groups_go_by_what_is_in_flight() -> None:
    desk = Desk("b", "a")
    assert desk.grant(4) == ["a", "b", "a", "b"]
    desk.tell(GroupFailed(group=1, reason="generation_error", error=""))
    desk.tell(Settled(group=1, fates=["failed:generation_error"] * 2))
    assert desk.grant() == ["b"]


def test_a_collector_whose_first_group_has_not_come_gets_none_of_what_the_others_ended() -> None:
    """FOUND-C3: balance by state; by history the silent one would get every second group."""
    desk = Desk("quick", "slow")
    desk.grant(8)
    desk.t = 1.0
    desk.arrive(0, 2, 4, 6)
    assert Counter(desk.grant(4)) == {"quick": 4}


def test_a_slow_collector_gets_a_group_when_the_others_are_so_full_that_theirs_would_take_as_long() -> None:
    """FOUND-C3: 1 s and 10 s, at usual loads of 4: (1 + 46/4) / 2 · 1 s = (1 + 1/4) / 2 · 10 s."""
    desk = Desk("quick", "slow")
    desk.grant(8)
    desk.t = 1.0
    desk.arrive(0, 2, 4, 6)
    desk.t = 10.0
    desk.arrive(1, 3, 5, 7)
    chosen = desk.grant(60)
    assert chosen.index("slow") >= 30
    assert 1 <= chosen.count("slow") <= 3


def test_a_collector_that_was_slow_is_tried_again_and_has_its_share_when_it_is_quick() -> None:
    """A first group that waited for a compilation must not cost the collector the whole run."""
    desk = Desk("quick", "slow")
    desk.grant(2)
    desk.t = 1.0
    desk.arrive(0)
    desk.t = 10.0
    desk.arrive(1)
    later = 10.0 * TRIED_AGAIN_AFTER
    while desk.t < later:
        assert desk.grant() == ["quick"]
        desk.t += 1.0
        desk.arrive(desk.groups - 1)
    assert desk.grant(2) == ["slow", "quick"]
    desk.t += 1.0
    desk.arrive(desk.groups - 2, desk.groups - 1)
    assert Counter(desk.grant(4)) == {"slow": 2, "quick": 2}


def test_an_exact_run_goes_by_turns_whatever_the_times() -> None:
    """Invariant 11: at staleness 0 which collector gets a group is no matter of time."""
    desk = Desk("a", "b", exact=True)
    desk.grant(4)
    desk.t = 1.0
    desk.arrive(0, 2)
    assert desk.grant(4) == ["a", "b", "a", "b"]


def run(seconds: Sequence[float], *, staleness: int = 1, steps: int = 60) -> Outcome:
    config = simulated_config(
        collector__count=len(seconds), rollout__max_staleness=staleness, rollout__groups_per_step=4, run__steps=steps
    )
    generators = [FakeGenerator(seconds=lambda call, takes=takes: takes) for takes in seconds]  # type: ignore[misc]
    return simulate(config, generators=generators, rank_seconds=lambda step: 0.5)


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_a_collector_ten_times_slower_costs_a_run_its_first_groups_at_most(staleness: int) -> None:
    """FOUND-C3: no slower than without it but for its share of the first grants, which is lost once."""
    alone, both = run([1.0], staleness=staleness), run([1.0, 10.0], staleness=staleness)
    assert both.seconds <= alone.seconds + 10.0
    granted = Counter(event.collector for event in both.of(Dispatched))
    first = (staleness + 1) * 4 // 2
    assert granted["collector1"] <= first + 2
    assert both.ledger.by_reason("dropped").get("stale", 0) <= 4 * (first + 2)


def test_equal_collectors_share_equally() -> None:
    granted = Counter(event.collector for event in run([1.0, 1.0]).of(Dispatched))
    assert abs(granted["collector0"] - granted["collector1"]) <= 4


def test_what_a_run_granted_follows_from_its_log() -> None:
    """The events alone, in their order, say to whom each group had to go."""
    outcome = run([1.0, 3.0], steps=20)
    balance = Balance(["collector0", "collector1"], exact=False)
    for event in outcome.events:
        if isinstance(event, Dispatched):
            assert balance.choose() == event.collector
        if isinstance(event, Balance.kinds):
            balance.apply(event)
