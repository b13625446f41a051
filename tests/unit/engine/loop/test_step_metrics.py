"""Figures of a plan against sums written out."""

import pytest

from asyncrl.engine import metrics
from asyncrl.engine.loop.step_metrics import StepMetrics
from asyncrl.engine.records import MicroBatch, Plan
from asyncrl.engine.records.work import RankResult

LENGTHS = {"a": 4, "b": 2, "c": 6}
PLAN = Plan(
    (
        (MicroBatch(("a", "b"), 6), MicroBatch(("b",), 2, filler=True)),
        (MicroBatch(("c",), 6), MicroBatch(("b",), 2, filler=True)),
    )
)


def result(seconds: float, peak_flops: float = 0.0, waited_s: float = 0.0) -> RankResult:
    return RankResult(0.0, 0.0, 0, 0.0, 1, 1.0, seconds=seconds, peak_flops=peak_flops, waited_s=waited_s)


def figures(*, packed: bool = False, one_length: bool = False, peak: float = 0.0) -> dict[str, float]:
    feedback = StepMetrics(lambda tokens: 10.0 * tokens, packed=packed, one_length=one_length)
    return feedback.figures(PLAN, LENGTHS, [result(3.0, peak, 0.25), result(1.0, peak, 0.5)]).metrics


def test_shares_of_fillers_padding_and_waiting_are_what_the_plan_and_the_clock_say() -> None:
    found = figures()
    assert found[metrics.FILLER_FRACTION] == pytest.approx(4 / 16)
    # Rows of 4 + 4, 2, 6 and 2 positions hold 6, 2, 6 and 2 tokens.
    assert found[metrics.PADDING_FRACTION] == pytest.approx(2 / 18)
    assert found[metrics.MEASURED_IMBALANCE] == pytest.approx(1.5)
    assert found[metrics.BUBBLE_FRACTION] == pytest.approx(1 / 3)
    assert found[metrics.RANK_SECONDS] == 3.0
    assert found[metrics.ROW_WAIT] == 0.5
    assert found[metrics.FLOPS] == 120.0


@pytest.mark.parametrize(
    ("packed", "one_length", "padding"),
    [(True, False, 0.0), (False, True, 1 - 16 / 30), (True, True, 1 - 16 / 24)],
)
def test_padding_is_of_the_rows_that_are_run(packed: bool, one_length: bool, padding: float) -> None:
    """Packed: a micro-batch is one row. One length: every row is as long as the longest."""
    assert figures(packed=packed, one_length=one_length)[metrics.PADDING_FRACTION] == pytest.approx(padding)


def test_the_share_of_peak_is_over_the_time_of_the_slowest_rank() -> None:
    """120 FLOPs in 3 s on two devices of 100 FLOPs a second; 0 where a device is not known."""
    assert figures(peak=100.0)[metrics.PEAK_FRACTION] == pytest.approx(120 / (3 * 200))
    assert figures()[metrics.PEAK_FRACTION] == 0.0


def test_seconds_are_predicted_from_earlier_steps_alone() -> None:
    """Two ranks of 80 computed FLOPs each; nothing is known for the first two steps, which warm up."""
    feedback = StepMetrics(lambda tokens: 10.0 * tokens, packed=False, one_length=False)
    steps = [feedback.figures(PLAN, LENGTHS, [result(s), result(2 * s)]) for s in (9.0, 0.25, 0.5, 0.5)]
    found = [step.metrics for step in steps]
    assert [one[metrics.PREDICTED_SECONDS] for one in found[:2]] == [0.0, 0.0]
    assert [one.predicted_seconds for one in steps[:2]] == [[], []]
    assert found[2][metrics.PREDICTED_SECONDS] == pytest.approx(0.375)
    assert steps[2].predicted_seconds == pytest.approx([0.375, 0.375])
    assert steps[2].rank_seconds == [0.5, 1.0]
    assert found[2][metrics.PREDICTION_ERROR] == pytest.approx((0.25 + 0.625) / 2)
    assert 0.375 < found[3][metrics.PREDICTED_SECONDS] < 0.75
    idle = feedback.figures(PLAN, LENGTHS, [result(1e-9), result(0.5)]).metrics
    assert idle[metrics.PREDICTION_ERROR] < 1, "FOUND-L2: an error over next to nothing"


@pytest.mark.parametrize(("packed", "positions"), [(False, 2 * 6 + 3 + 6 + 3), (True, 6 + 3 + 3 + 6 + 3)])
def test_padding_counts_positions_that_alignment_adds(packed: bool, positions: int) -> None:
    """Lengths 4, 2 and 6 take 6, 3 and 6 positions in multiples of 3; 16 positions hold a token."""
    found = StepMetrics(None, packed=packed, one_length=False, align=3).figures(PLAN, LENGTHS, [result(1.0)] * 2)
    assert found.metrics[metrics.PADDING_FRACTION] == pytest.approx(1 - 16 / positions)
