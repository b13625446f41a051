"""Make the traces in tests/traces anew, each a run of the real controller in virtual time.

    scripts/record_traces [--out tests/traces] [NAME ...]

The same code makes the same bytes. Together they have what a replay must follow; test_traces.py in
tests/whole/engine/trace says what that is, and fails where they get thin. `schema-1.jsonl` and `ray-reverse.jsonl`
are not made here: they are logs of older schemas, kept as witnesses that those still replay (the second one of
`asyncrl train --config reverse` on Ray and TransferQueue).
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anyio
import msgspec
import structlog

from asyncrl.engine.aio.virtual_time import virtual_clock
from asyncrl.engine.deployment import CONSUMER, PARTITION
from asyncrl.engine.errors import ActorDied
from asyncrl.engine.events.types import AnyEvent, GroupFailed, OwnerDead
from asyncrl.engine.loop.controller import Controller
from asyncrl.engine.records.columns import COLUMNS
from asyncrl.engine.testing.conformance.spanning import SpanningGenerator
from asyncrl.engine.testing.fakes import FakeGenerator, FakeTask
from asyncrl.engine.testing.simulation import Outcome, simulate, simulated_config
from asyncrl.engine.testing.trace import recording_of, seeded_delays
from asyncrl.engine.trace.cutting import write_log

TRACES = Path(__file__).parents[1] / "tests" / "traces"

_SMALL = {"run__steps": 6, "rollout__groups_per_step": 3, "rollout__group_size": 4, "trainer__ranks": 2}


def _reward(group: int, index: int) -> float:
    """A third of the groups are flat; of the others samples differ."""
    return 1.0 if group % 3 == 1 else float((group + index) % 3)


def _length(call: int) -> int:
    return 2 + call * 5 % 13


def _gap(key: str) -> tuple[float, float]:
    return (0.9, 0.1) if key.endswith("g1") else (0.2, 0.0)


def _fail(call: int) -> None:
    if call % 11 == 5:
        raise RuntimeError(f"call {call} went wrong")


def overlap() -> Outcome:
    """Two ranks, two updates, stale drops, masks by budget and importance, verdicts while a step runs."""
    return simulate(
        simulated_config(
            **_SMALL,
            trainer__updates_per_batch=2,
            trainer__micro_batch_tokens=14,
            trainer__loss_normalisation="sequence_mean",
            trainer__reference_kl=0.1,
            rollout__max_staleness=1,
            rollout__requeue_tries=1,
            filters=[{"name": "zero_std"}, {"name": "importance_outliers", "max_log_ratio": 0.5}],
        ),
        task=FakeTask.in_order(_reward, prompts=11),
        generators=[
            FakeGenerator(seconds=seeded_delays(1), length=_length, fail=_fail),
            FakeGenerator(seconds=seeded_delays(2, mean_s=5.0, spread=1.0), length=_length),
        ],
        rank_seconds=seeded_delays(3, mean_s=1.5),
        rank_gap=_gap,
    )


def refill() -> Outcome:
    """Refill, also at hand-off, with early cancelling and prompts that come again."""
    return simulate(
        simulated_config(
            **_SMALL,
            rollout__max_staleness=1,
            rollout__cancel_stale=True,
            rollout__requeue_tries=2,
            filters=[
                {"name": "zero_std"},
                {"name": "dynamic_sampling", "max_attempts": 3, "on_exhausted": "train_partial"},
            ],
        ),
        task=FakeTask.in_order(_reward, prompts=11),
        generators=[
            FakeGenerator(seconds=seeded_delays(4), length=_length, fail=_fail),
            FakeGenerator(seconds=seeded_delays(5, mean_s=5.0, spread=1.2), length=_length),
        ],
        rank_seconds=seeded_delays(6),
    )


def gate() -> Outcome:
    """A gate that holds batches back, and pacing; to the end of the data."""
    return simulate(
        simulated_config(
            **{**_SMALL, "run__steps": None},
            task__epochs=3,
            rollout__stale_mode="gate",
            rollout__max_staleness=2,
            rollout__pacing=True,
            trainer__loss_normalisation="constant",
        ),
        task=FakeTask.in_order(_reward, prompts=7),
        generators=[
            FakeGenerator(seconds=seeded_delays(7), length=_length),
            FakeGenerator(seconds=seeded_delays(8, mean_s=6.0, spread=1.0), length=_length),
        ],
        rank_seconds=seeded_delays(9, mean_s=0.5),
    )


def tokens() -> Outcome:
    """Weights swapped within responses; tokens that are too old are withheld."""
    return simulate(
        simulated_config(**_SMALL, rollout__stale_mode="tokens", rollout__max_staleness=1),
        task=FakeTask.in_order(_reward, prompts=11),
        generators=[
            SpanningGenerator(clock=virtual_clock, seconds=seeded_delays(10, mean_s=3.0), length=_length),
            SpanningGenerator(clock=virtual_clock, seconds=seeded_delays(11, mean_s=9.0), length=_length),
        ],
        rank_seconds=seeded_delays(12, mean_s=0.5),
    )


def dead_owner() -> Outcome:
    """A second driver claims groups and dies; they are claimed again. Then a collector dies, and the run with it."""

    class Mortal(FakeGenerator):
        async def run(self) -> None:
            await anyio.sleep(10.0)
            raise ActorDied("it was killed", actor="collector1")

    return simulate(
        simulated_config(**{**_SMALL, "run__steps": 60}, rollout__max_staleness=2),
        task=FakeTask.in_order(_reward, prompts=11),
        generators=[
            FakeGenerator(seconds=seeded_delays(13), length=_length),
            Mortal(seconds=seeded_delays(14, mean_s=2.0), length=_length),
        ],
        rank_seconds=seeded_delays(15),
        beside=_other_driver,
    )


async def _other_driver(controller: Controller) -> None:
    """Claim two groups under another name, and be declared dead with them."""
    groups, plane = controller.core.groups, controller._deployment.plane
    for number, begin_s in enumerate((2.05, 4.05), start=1):
        owner = f"driver-{number}"
        await anyio.sleep(begin_s - virtual_clock())
        await groups.changed.wait_at_most(lambda: groups.buffered > 0, 100.0)
        claim = await plane.claim(
            PARTITION, CONSUMER, columns=COLUMNS, max_groups=2, owner=owner, claim_id=f"{owner}/0"
        )
        groups.claim(claim, asked=2)
        await anyio.sleep(0.3)
        await plane.reap(PARTITION, [owner])
        controller._events.append(OwnerDead(owner=owner, groups=[g.group for g in claim.groups], error="killed"))
        groups.take_back(group.group for group in claim.groups)


RECORDED: Mapping[str, Callable[[], Outcome]] = {
    "overlap": overlap,
    "refill": refill,
    "gate": gate,
    "tokens": tokens,
    "dead-owner": dead_owner,
}


def record(name: str) -> list[AnyEvent]:
    """Return the events of a trace, numbered from 1."""
    with structlog.testing.capture_logs():
        events = recording_of(RECORDED[name]()).events
    return [msgspec.structs.replace(_brief(event), seq=seq) for seq, event in enumerate(events, start=1)]


def _brief(event: AnyEvent) -> AnyEvent:
    """Keep the last line of an error: the traceback above it names folders of whoever records."""
    if isinstance(event, GroupFailed):
        return msgspec.structs.replace(event, error=event.error.rstrip().rpartition("\n")[2])
    return event


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*RECORDED, []], metavar="NAME", help=", ".join(RECORDED))
    parser.add_argument("--out", type=Path, default=TRACES)
    asked: Any = parser.parse_args()
    for name in asked.names or RECORDED:
        path = asked.out / f"{name}.jsonl"
        print(f"{path.name}: {write_log(path, record(name))} events, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
