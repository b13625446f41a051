"""The figures of an evaluation, counted from its answered prompts."""

import pytest

from asyncrl.engine.events.types import Evaluated
from asyncrl.engine.records.scores import score, score_datasets


def answered(dataset: str, rewards: list[float | None], statuses: list[str] | None = None) -> Evaluated:
    return Evaluated(
        version=3,
        prompt=0,
        dataset=dataset,
        rewards=list(rewards),
        tokens=[0 if reward is None else 2 + i for i, reward in enumerate(rewards)],
        statuses=statuses or ["finished"] * len(rewards),
    )


PROMPTS = [
    answered("sums", [1.0, 0.0, 1.0, 0.0], ["finished", "truncated", "finished", "finished"]),
    answered("sums", [0.0, 0.0, 0.0, 0.0]),
    answered("words", [0.5, None, 1.0, None]),
    answered("words", [None, None, None, None]),
]


def test_samples_without_a_reward_count_neither_as_passed_nor_as_failed() -> None:
    """Of the third prompt two samples count, one passes: pass@1 1/2, pass@2 1, and no pass@4."""
    found = score(PROMPTS, samples=4, pass_reward=1.0)
    assert (found.prompts, found.samples, found.failed_samples) == (3, 10, 6)
    values = {k: estimate.value for k, estimate in found.pass_at.items()}
    assert values == {
        "1": pytest.approx((1 / 2 + 0 + 1 / 2) / 3),
        "2": pytest.approx((5 / 6 + 0 + 1) / 3),
        "4": pytest.approx((1 + 0) / 2),
    }
    assert found.reward is not None
    assert found.reward.value == pytest.approx((0.5 + 0 + 0.75) / 3)
    assert found.truncated == pytest.approx(1 / 10)
    assert found.tokens == pytest.approx((14 + 14 + 6) / 10)


def test_what_passes_is_a_matter_of_the_reward_asked_for() -> None:
    assert score(PROMPTS, samples=4, pass_reward=0.5).pass_at_1 == pytest.approx((1 / 2 + 0 + 1) / 3)


def test_each_data_set_has_its_own_figures() -> None:
    found = score_datasets(PROMPTS, samples=4, pass_reward=1.0)
    assert {name: scores.pass_at_1 for name, scores in found.items()} == {"sums": 0.25, "words": 0.5}


def test_without_a_scored_sample_there_is_no_figure() -> None:
    found = score(PROMPTS[3:], samples=4, pass_reward=1.0)
    assert (found.failed_samples, found.pass_at_1, found.reward) == (4, None, None)
