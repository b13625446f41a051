"""The proof that every sample has one fate names those that do not."""

from collections.abc import Callable

import msgspec
import pytest

from asyncrl.engine.events.types import AnyEvent, Dispatched, Put, Settled, StepStarted
from asyncrl.engine.trace.conservation import prove
from asyncrl.engine.trace.recording import Recording

Record = Callable[..., Recording]

LIFE: list[AnyEvent] = [
    Dispatched(seq=1, group=3, prompt=0, dataset="d", size=2, collector="c"),
    Put(seq=2, group=3, keys=["v0_p3_g0", "v0_p3_g1"], tags={}),
    StepStarted(seq=3, step=1, version=0, groups=[3]),
    Settled(seq=4, group=3, fates=["trained", "masked:long"]),
]


def test_a_whole_run_is_proved_and_its_fates_add_up(record: Record) -> None:
    proof = prove(record().events)
    assert proof.faults() == []
    assert proof.samples == sum(proof.fates.values()) > 0
    assert proof.ended


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        (LIFE[:3], "group 3 (v0_p3_g0 to v0_p3_g1): no fate; dispatched by event 1"),
        (LIFE[:1], "group 3 (2 samples without a put): no fate; dispatched by event 1"),
        ([*LIFE, Settled(seq=5, group=3, fates=["trained", "trained"])], "two fates, by events 4 and 5"),
        ([*LIFE[:3], Settled(seq=4, group=3, fates=["trained"])], "1 fates for 2 samples"),
        ([*LIFE[:2], LIFE[3]], "sample 0 was trained in no step"),
        (
            [*LIFE[:3], Settled(seq=4, group=3, fates=["trained", "lost"])],
            "sample 1 has the fate 'lost', which is none",
        ),
        ([*LIFE[:3], Settled(seq=4, group=3, fates=["dropped:", "trained"])], "sample 0 has the fate 'dropped:'"),
        ([*LIFE, LIFE[0]], "group 3 was dispatched twice, by events 1 and 1"),
        (LIFE[1:], "group 3 of event 2 was never dispatched"),
    ],
)
def test_each_breach_is_named(events: list[AnyEvent], fault: str) -> None:
    assert any(fault in found for found in prove(events).faults())
    assert prove(LIFE).faults() == []


def test_every_fate_taken_from_a_run_is_missed(record: Record) -> None:
    recording = record()
    for settled in [event for event in recording.events if isinstance(event, Settled)][::7]:
        faults = prove(event for event in recording.events if event is not settled).faults()
        assert len(faults) == 1
        assert faults[0].startswith(f"group {settled.group} (")
        twice = prove([*recording.events, msgspec.structs.replace(settled, seq=9999)]).faults()
        assert len(twice) == 1
