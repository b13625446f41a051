"""What the user watches: steps, windows of rewards, ages, tokens."""

import pytest

from asyncrl.engine.events.means import Means
from asyncrl.engine.events.progress import Progress
from asyncrl.engine.events.types import BatchJudged, Put, StepEnded


def judged(total: float, count: int) -> BatchJudged:
    return BatchJudged(batch=0, judged=1, kept=0, attempts=1, reward_sum=total, reward_count=count)


def ended(version: int, ages: dict[str, int], *, reward_sum: float = 0.0, t: float = 0.0) -> StepEnded:
    return StepEnded(
        step=version,
        version=version,
        seconds=1.0,
        ages=ages,
        samples=sum(ages.values()),
        tokens=10,
        reward_sum=reward_sum,
        metrics={},
        t=t,
    )


def test_first_and_last_windows_are_weighted_by_samples() -> None:
    progress = Progress()
    for i in range(25):
        progress.apply(judged(float(i) * (i + 1), i + 1))
    first = [(float(i) * (i + 1), i + 1) for i in range(10)]
    last = [(float(i) * (i + 1), i + 1) for i in range(15, 25)]
    assert (progress.rewards.first, list(progress.rewards.last)) == (first, last)
    expected = sum(total for total, _ in last) / sum(count for _, count in last)
    assert Means.mean(progress.rewards.last) == pytest.approx(expected)


def test_a_mean_of_nothing_is_none() -> None:
    """I6: a batch in which every reward is NaN has no mean."""
    progress = Progress()
    assert Means.mean(progress.rewards.first) is None
    progress.apply(judged(0.0, 0))
    assert Means.mean(progress.rewards.last) is None
    assert progress.mean_of_last(1) is None


@pytest.mark.parametrize("window", [1, 3, 10, 25])
def test_the_mean_of_the_last_batches_waits_for_so_many_and_takes_exactly_those(window: int) -> None:
    """A window over ten batches is no window of ten."""
    progress = Progress(window)
    for i in range(window - 1):
        progress.apply(judged(float(i), 1))
    assert progress.mean_of_last(window) is None
    for i in range(window - 1, 40):
        progress.apply(judged(float(i), 1))
        assert progress.mean_of_last(window) == pytest.approx(i - (window - 1) / 2)


def test_more_batches_than_are_kept_are_refused() -> None:
    progress = Progress(12)
    for _ in range(20):
        progress.apply(judged(1.0, 1))
    with pytest.raises(ValueError, match="only the last 12"):
        progress.mean_of_last(13)


def test_steps_add_up_ages_tokens_and_rewards_of_trained_samples() -> None:
    """I1: the histogram counts trained samples."""
    progress = Progress()
    progress.apply(ended(1, {"0": 3, "2": 1}, reward_sum=2.0, t=50.0))
    progress.apply(ended(2, {"2": 4}, reward_sum=4.0, t=60.0))
    assert progress.ages == {0: 3, 2: 5}
    assert (progress.steps, progress.trained_tokens, progress.first_step_s) == (2, 20, 50.0)
    assert Means.mean(progress.trained_rewards.last) == 6.0 / 8


def test_generated_tokens_come_from_puts() -> None:
    progress = Progress()
    progress.apply(Put(group=0, keys=[], tags={"response_tokens": [1, 2, 0]}))
    progress.apply(Put(group=1, keys=[], tags={}))
    assert progress.generated_tokens == 3
