"""What the loop knows, written and read again."""

import math

import msgspec
import pytest

from asyncrl.engine.checkpoint.state import (
    BatchState,
    CoreState,
    FrontEndState,
    GrantState,
    GroupState,
    JudgementState,
    PromptsState,
    PromptState,
    RetirementState,
    RunState,
    read_run,
    read_state,
    write_state,
)
from asyncrl.engine.errors import CheckpointBroken

GRANT = GrantState(3, PromptState("1", "1>", "1", "sums", {"level": [1, None]}), 2, 0, 1)
BATCH = BatchState(
    index=4,
    judged=[1, 3],
    kept=[JudgementState(3, "", {1: "nan_reward"}, [0], [0], ["stale"])],
    drops={"zero_std": 1},
    masked={},
    trained=None,
    reward_sum=0.5,
    reward_count=3,
    partial=False,
    gate_overdue=False,
)
STATE = RunState(
    CoreState(
        version=5,
        groups=[
            GroupState(GRANT, "claimed", ["v5_p3_g0", "v5_p3_g1"], {"group": 3, "version": 5, "reward": [0.5, 1.0]})
        ],
        out=[3],
        unpublished={5: [1, 2]},
        front_end=FrontEndState(5, BATCH, []),
        statistics={"prompts": {"1": [1, 2, 0.5]}},
        filters={"0:mine": {"seen": math.inf}},
        filter_stats={},
    ),
    PromptsState(12, {"drawn": 6}, [GRANT]),
    RetirementState([(1, 2), ("1", 3)], [], ""),
    next_group=4,
    turns={"collector0": 4},
)


def test_what_is_read_is_what_was_written() -> None:
    """Also infinities, the prompts 1 and "1", and the indices of samples, which JSON would make texts."""
    assert read_state(write_state(STATE)) == STATE


def test_a_reward_that_is_not_a_number_comes_back() -> None:
    group = msgspec.structs.replace(STATE.core.groups[0], tags={"reward": [math.nan]})
    core = msgspec.structs.replace(STATE.core, groups=[group])
    read = read_state(write_state(msgspec.structs.replace(STATE, core=core)))
    assert math.isnan(read.core.groups[0].tags["reward"][0])


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 100_000, write_state(STATE).replace('"claimed"', '"nowhere"')])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(CheckpointBroken, match="cannot be read as a"):
        read_state(text)
    with pytest.raises(CheckpointBroken):
        read_run(text)
