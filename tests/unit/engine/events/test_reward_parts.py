"""What each reward function gives, from events fed by hand."""

from typing import Any

import pytest

from asyncrl.engine.events.progress import Progress
from asyncrl.engine.events.types import BatchJudged, Put, RunStarted


def judged() -> BatchJudged:
    return BatchJudged(batch=0, judged=1, kept=1, attempts=1, reward_sum=1.0, reward_count=1)


def put(**tags: Any) -> Put:
    return Put(group=0, keys=[], tags={"response_tokens": [1, 1, 1], **tags})


def test_each_part_has_its_means_by_batch_and_stand_ins_are_counted() -> None:
    progress = Progress()
    functions = [{"name": "exact_match"}, {"name": "my.py:style", "weight": 0.5}]
    progress.apply(RunStarted(schema=1, config={"reward": {"functions": functions}}, software={}))
    first = put(
        exact_match=[1.0, 0.0, None],
        style=[{"float": "nan"}, 4.0, None],
        cause=[None, None, "score_error"],
        status=["finished", "finished", "finished"],
    )
    second = put(
        exact_match=[1.0, 1.0, 1.0], cause=[None, "score_error", None], status=["finished", "failed", "finished"]
    )
    for event in (first, judged(), second, judged()):
        progress.apply(event)
    parts = progress.reward_parts
    assert parts.metrics() == {
        "reward/exact_match_mean": 1.0,
        "reward/style_mean": 0.0,
        "reward/on_failure_samples": 1,
    }
    assert parts.recent() == {"exact_match": pytest.approx(0.8), "style": 4.0}


def test_a_task_that_scores_itself_has_no_parts_here() -> None:
    progress = Progress()
    progress.apply(RunStarted(schema=1, config={}, software={}))
    progress.apply(put(style=[1.0, 1.0, 1.0]))
    progress.apply(judged())
    assert progress.reward_parts.summary() == {}
