"""What a log does not say is no difference; what it says is."""

import msgspec

from asyncrl.engine.events.types import Planned, StepEnded
from asyncrl.engine.trace.difference import differences


def planned(*updates: int) -> Planned:
    return Planned(batch=0, step=1, ranks=[[["a"], ["b"]]], fillers=0, updates=updates)


def test_a_log_that_does_not_say_where_updates_end_agrees_with_any() -> None:
    assert differences(planned(), planned(1, 1)) == []
    assert differences(planned(1, 1), planned(1, 1)) == []
    assert differences(planned(2, 1), planned(1, 2)) != []


def test_a_log_that_does_not_say_which_micro_batches_are_fillers_agrees_with_any() -> None:
    def filled(*places: tuple[int, int]) -> Planned:
        return msgspec.structs.replace(planned(), fillers=1, filler_places=places)

    assert differences(filled(), filled((0, 1))) == []
    assert differences(filled((0, 1)), filled((0, 1))) == []
    assert differences(filled((0, 0)), filled((0, 1))) != []


def test_what_every_log_says_must_not_lack() -> None:
    assert differences(msgspec.structs.replace(planned(1, 1), ranks=[]), planned(1, 1)) != []


def test_seconds_of_ranks_are_not_repeated_by_a_replay() -> None:
    recorded = StepEnded(
        step=1,
        version=1,
        seconds=1.0,
        ages={},
        samples=1,
        tokens=1,
        reward_sum=0.0,
        metrics={},
        rank_seconds=(0.5,),
        predicted_seconds=(0.4,),
    )
    replayed = msgspec.structs.replace(recorded, rank_seconds=(0.0,), predicted_seconds=())
    assert differences(recorded, replayed) == []
