"""Which collector gets the next group: by what is in flight and how long it takes, as the log says."""

from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest

from asyncrl.engine.events.types import ActorRestarted, AnyEvent, Dispatched, GroupFailed, OwnerDead, Put, Settled
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

    def recall(self, *groups: int) -> None:
        for group in groups:
            self.tell(Settled(group=group, fates=["dropped:recalled"] * 2))

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


def run(seconds: Sequence[float], *, staleness: int = 1, steps: int = 30) -> Outcome:
    config = simulated_config(
        collector__count=len(seconds), rollout__max_staleness=staleness, rollout__groups_per_step=4, run__steps=steps
    )
    generators = [FakeGenerator(seconds=lambda call, takes=takes: takes) for takes in seconds]  # type: ignore[misc]
    return simulate(config, generators=generators, rank_seconds=lambda step: 0.5)


def test_a_collector_that_brings_nothing_in_twice_the_time_of_the_others_is_late() -> None:
    """FOUND-C3: its first groups hold run-ahead that the others could use."""
    desk = Desk("quick", "slow")
    desk.grant(8)
    assert not desk.balance.late()
    desk.t = 1.0
    desk.arrive(0, 2, 4)
    assert not desk.balance.late()
    desk.arrive(6)
    assert desk.balance.late() == {"slow": (2.0, [1, 3, 5, 7])}
    desk.t = 1.5
    desk.arrive(1)
    assert not desk.balance.late()


def test_of_one_group_nobody_knows_whether_it_is_long_or_its_collector_slow() -> None:
    desk = Desk("quick", "slow")
    desk.grant(2)
    desk.t = 1.0
    desk.arrive(0)
    assert not desk.balance.late()


def test_a_collector_from_which_groups_were_recalled_is_tried_with_one_at_a_time() -> None:
    """FOUND-C3: late after 2 s, it has another try at 16 · 4 s, and is late with that after 4 s."""
    desk = Desk("quick", "slow")
    desk.grant(4)
    desk.t = 1.0
    desk.arrive(0, 2)
    desk.t = 2.0
    desk.recall(1, 3)
    assert set(desk.grant(20)) == {"quick"}
    desk.t = 64.0
    assert desk.grant() == ["quick"]
    desk.t = 65.0
    desk.arrive(24)
    assert desk.grant(3).count("slow") == 1
    (tried,) = (group for _, groups in desk.balance.late().values() for group in groups)
    assert desk.balance.late() == {"slow": (69.0, [tried])}
    desk.t = 67.0
    desk.arrive(tried)
    assert not desk.balance.late()


@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("slow", [10.0, 1000.0])
def test_a_slow_collector_costs_a_run_no_more_than_the_time_until_it_is_known(staleness: int, slow: float) -> None:
    """FOUND-C3: however slow; that it is slow is known when twice the time of the quick one's groups has passed."""
    alone, both = run([1.0], staleness=staleness, steps=20), run([1.0, slow], staleness=staleness, steps=20)
    assert both.seconds <= alone.seconds + 1.0
    granted = Counter(event.collector for event in both.of(Dispatched))
    assert granted["collector1"] <= (staleness + 1) * 4 // 2
    assert both.ledger.by_reason("dropped").get("stale", 0) == 0


@pytest.mark.parametrize("seconds", [[1.0, 10.0, 10.0], [1.0, 1.0, 10.0]])
def test_a_slow_collector_costs_no_more_among_several(seconds: list[float]) -> None:
    """FOUND-C3: also where the quick one's share of the first groups is not enough for a batch."""
    assert run(seconds, steps=20).seconds <= run([1.0], steps=20).seconds + 2.0


def test_recalled_prompts_come_again() -> None:
    """FOUND-C3: no prompt is lost to a slow collector."""
    outcome = run([1.0, 10.0], steps=3)
    recalled = [event.group for event in outcome.of(Settled) if "dropped:recalled" in event.fates]
    assert recalled == [1, 3, 5, 7]
    dispatched = {event.group: event for event in outcome.of(Dispatched)}
    again = {event.retry_of: event for event in dispatched.values() if event.retry_of is not None}
    assert sorted(again) == recalled
    assert all(again[group].prompt == dispatched[group].prompt for group in recalled)


def test_at_staleness_0_a_step_waits_for_the_slowest_as_in_synchronous_training() -> None:
    """Invariant 11: which collector decodes a group is part of what must come out the same."""
    outcome = run([1.0, 10.0], staleness=0, steps=3)
    assert Counter(event.collector for event in outcome.of(Dispatched)) == {"collector0": 6, "collector1": 6}


@pytest.mark.parametrize("exact", [False, True])
def test_one_that_died_gets_nothing_until_its_successor_works_and_then_its_share(exact: bool) -> None:
    """Neither what it had in flight nor the turns that it missed count."""
    desk = Desk("a", "b", exact=exact)
    desk.grant(4)
    desk.tell(OwnerDead(owner="a", groups=[], replaced=True))
    assert desk.grant(4) == ["b"] * 4
    desk.tell(Settled(group=0, fates=["failed:collector_died"] * 2))
    desk.arrive(2)
    desk.tell(OwnerDead(owner="b", groups=[], replaced=True))
    assert not desk.balance.any_left
    for name in "ab":
        desk.tell(ActorRestarted(actor=name))
    assert Counter(desk.grant(4)) == {"a": 2, "b": 2}


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
