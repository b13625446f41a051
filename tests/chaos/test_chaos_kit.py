"""The kit itself: a seed is a plan, a history that is wrong is told, and a figure that grows is named."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest
from kit.history import History
from kit.plan import PARTS, STARTING, draw
from kit.soak import growing
from kit.tail import Tail

from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.types import (
    AnyEvent,
    Dispatched,
    Put,
    RunEnded,
    RunStarted,
    Settled,
    StepEnded,
    StepStarted,
)


def test_a_seed_is_a_plan_whose_first_faults_kill_each_part() -> None:
    plans = [list(islice(draw(seed, limit_s=5.0), 300)) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]
    assert sorted(fault.part for fault in plans[0][:6]) == sorted(PARTS)
    assert {fault.kind for fault in plans[0]} == {"kill", "stop", "pause", "slow"}
    assert all(fault.kind == "kill" for fault in plans[0] if fault.moment == STARTING)
    assert max(fault.seconds for fault in plans[0]) <= 2.5


def group(number: int, prompt: int, *, version: int = 0, retry_of: int | None = None) -> list[AnyEvent]:
    """A group of one sample that is dispatched and put."""
    return [
        Dispatched(group=number, prompt=prompt, dataset="", size=1, collector="c", retry_of=retry_of),
        Put(group=number, keys=[f"v{version}_p{number}_g0"], tags={"version": version}),
    ]


def step(number: int, groups: Sequence[int], ages: dict[str, int]) -> list[AnyEvent]:
    return [
        StepStarted(step=number, version=number - 1, groups=list(groups)),
        *(Settled(group=number, fates=["trained"]) for number in groups),
        StepEnded(step=number, version=number, seconds=1, ages=ages, samples=1, tokens=1, reward_sum=0.0, metrics={}),
    ]


RIGHT = [*group(0, 0), *group(1, 1), *step(1, [0], {"0": 1}), *step(2, [1], {"1": 1})]
GIVEN_UP = Settled(group=0, fates=["dropped:not_restored"])
DIED = Settled(group=0, fates=["failed:collector_died"])


@pytest.mark.parametrize(
    ("events", "lost", "twice", "said"),
    [
        (RIGHT, 0, 0, ""),
        ([*group(0, 0), GIVEN_UP, *group(2, 0, retry_of=0), *group(1, 1), *step(1, [1, 2], {"0": 2})], 0, 0, ""),
        ([*group(0, 0), DIED, *group(2, 0, retry_of=0), *group(1, 1), *step(1, [1, 2], {"0": 2})], 0, 0, ""),
        ([*group(0, 0), GIVEN_UP, *group(1, 1), *step(1, [1], {"0": 1})], 1, 0, "prompt 0 came to an end 0 times"),
        ([*group(0, 0), *step(1, [0], {"0": 1})], 1, 0, "prompt 1 came to an end 0 times"),
        ([*RIGHT, *group(2, 0, version=2), *step(3, [2], {"0": 1})], 0, 1, "prompt 0 came to an end 2 times"),
        ([*RIGHT, *group(2, 1, version=2, retry_of=1), *step(3, [2], {"0": 1})], 0, 0, "group 1 has a fate, and its"),
        ([*RIGHT[:-3], *step(2, [1], {"0": 1})], 0, 0, "the ages of trained samples are"),
        ([*group(0, 0), *group(1, 1), *step(4, [0, 1], {"3": 2})], 0, 0, "2 samples of age 3 were trained"),
        ([*group(0, 0), *group(1, 1), *step(1, [1], {"0": 1})], 1, 0, "no fate"),
    ],
)
def test_a_history_is_told_what_is_wrong_with_it(
    tmp_path: Path, events: list[AnyEvent], lost: int, twice: int, said: str
) -> None:
    log = EventLog(clock=lambda: 0.0, wall=lambda: 0.0, path=tmp_path / "events.jsonl")
    for event in [RunStarted(schema=3, config={}, software={}), *events, RunEnded(code=0, reason="", keys_left=0)]:
        log.append(event)
    log.close()
    history = History.read(tmp_path, prompts=2, epochs=1, max_staleness=2)
    assert (history.lost, history.twice) == (lost, twice)
    assert bool(history.faults) == bool(said)
    assert said in "; ".join(history.faults)


def test_a_figure_that_grows_after_its_warm_up_is_named() -> None:
    series = {
        "rank.0 own_mb": [1.0, 90.0, 200.0, 200.0, 203.0, 203.0],
        "rank.1 own_mb": [1.0, 90.0, 200.0, 200.0, 205.0, 205.0],
        "score.0 files": [9.0, 9.0, 9.0, 9.0, 12.0, 12.0],
        "store rows": [6.0, 6.0, 2.0, 6.0, 4.0, 5.0],
    }
    assert growing(series) == {"rank.1 own_mb": [200.0, 205.0], "score.0 files": [9.0, 12.0]}


def test_the_tail_of_a_log_waits_for_whole_lines_and_survives_a_torn_one(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    tail = Tail(file)
    assert tail.read().counts == {}
    file.write_text('{"type":"put"}\n{"type":"step_en', encoding="utf-8")
    assert tail.read().counts == {"put": 1}
    file.write_text('{"type":"put"}\n{"type":"resumed","after":1}\n', encoding="utf-8")
    assert tail.read().last == {"type": "resumed", "after": 1}
    assert (tail.counts["put"], tail.steps) == (1, 0)
