"""What becomes of scores: those that raise, hang or lack what was declared; parts, extras and taggers."""

import sys
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from asyncrl.collectors.outcome import Rules
from asyncrl.collectors.scoring import AsyncScorer
from asyncrl.collectors.tasks import Reward
from asyncrl.engine.aio.virtual_time import virtual_clock
from asyncrl.engine.records import GroupMeta, Prompt
from asyncrl.engine.records.message import GroupFailure, Message, PutNotice
from asyncrl.engine.testing.fakes import FakeTask


class AsyncTask(FakeTask):
    """Scores sample i after 10 - i seconds; sample 2 raises, or never answers."""

    def __init__(self, hang: bool = False) -> None:
        super().__init__()
        self.hang = hang
        self.finished: list[int] = []

    async def score(self, prompt: Prompt, response: str) -> Reward | float:  # type: ignore[override]
        index = int(response[0])
        if index == 2:
            if self.hang:
                await anyio.sleep_forever()
            raise RuntimeError("judge is down")
        await anyio.sleep(10 - index)
        self.finished.append(index)
        return float(index)


def test_a_score_that_raises_fails_its_sample_alone(at_desk: Any, one_group: Any) -> None:
    """CASE-B10, CASE-H1: siblings keep their rewards; the failed one keeps its key and has nothing to train."""

    def reward(prompt: int, index: int) -> float:
        if index == 1:
            raise ValueError("no such answer")
        return float(index)

    group = at_desk(one_group, task=FakeTask(reward=reward))
    assert group.size == 4
    assert group.rewards == (0.0, None, 2.0, 3.0)
    assert group.statuses == ("finished", "failed", "finished", "finished")
    assert group.sample_tag("cause") == (None, "score_error", None, None)
    assert group.trainable_tokens == (2, 0, 2, 2)


def test_a_score_without_a_declared_extra_fails_its_sample_alone(at_desk: Any, one_group: Any) -> None:
    class Seeing(FakeTask):
        extras = ("image",)

    def reward(prompt: int, index: int) -> Reward:
        return Reward(1.0, extras={"image": torch.full((2,), index)} if index else {})

    async def work(desk: Any) -> tuple[GroupMeta, list[Any]]:
        group = await one_group(desk)
        return group, (await desk.plane.read("train", group.keys, ["image"]))["image"]

    group, images = at_desk(work, task=Seeing(reward=reward))
    assert group.statuses == ("failed", "finished", "finished", "finished")
    assert [image.tolist() for image in images] == [[], [1, 1], [2, 2], [3, 3]]


def test_async_scores_run_together_and_fail_alone(at_desk: Any, one_group: Any) -> None:
    task = AsyncTask()

    async def work(desk: Any) -> tuple[GroupMeta, float]:
        return await one_group(desk), virtual_clock()

    group, seconds = at_desk(work, task=task)
    assert group.rewards == (0.0, 1.0, None, 3.0)
    assert group.statuses[2] == "failed"
    assert task.finished == [3, 1, 0]
    assert seconds == pytest.approx(1 + 10)


def test_a_score_that_never_answers_fails_its_sample_at_its_deadline(at_desk: Any, grant: Any) -> None:
    """CASE-B4's kind, FOUND-C13: the sample fails as `score_timeout`, its siblings and the next group go on."""
    task = AsyncTask(hang=True)

    async def work(desk: Any) -> Any:
        await desk.collector.grant([grant(0)])
        await desk.hear(1)
        task.hang = False
        await desk.collector.grant([grant(1)])
        assert (await desk.collector.status())["in_flight"] == 1
        return await desk.hear(2)

    first, second = at_desk(work, scorer=AsyncScorer(task, Rules("judge", timeout_s=20.0)), group_timeout_s=5.0)
    assert isinstance(first, PutNotice)
    assert isinstance(second, PutNotice)
    assert first.group.rewards == (0.0, 1.0, None, 3.0)
    assert first.group.sample_tag("cause") == (None, None, "score_timeout", None)
    assert first.errors == ("task judge: score took longer than 20 s (collector.score_timeout_s)",)


def test_a_configured_reward_stands_in_for_a_score_that_failed_and_its_cause_stays(at_desk: Any, grant: Any) -> None:
    async def work(desk: Any) -> Any:
        await desk.collector.grant([grant(0)])
        return (await desk.hear(1))[0]

    put = at_desk(work, task=AsyncTask(), reward_on_failure=-0.5)
    assert isinstance(put, PutNotice)
    assert put.group.rewards == (0.0, 1.0, -0.5, 3.0)
    assert put.group.statuses[2] == "finished"
    assert put.group.sample_tag("cause") == (None, None, "score_error", None)
    assert "judge is down" in put.errors[0]


def test_a_configured_reward_hides_no_score_that_always_fails(at_desk: Any, grant: Any) -> None:
    async def work(desk: Any) -> Any:
        await desk.collector.grant([grant(0)])
        return (await desk.hear(1))[0]

    class Broken(FakeTask):
        def score(self, prompt: Prompt, response: str) -> float:
            raise ValueError("broken")

    assert isinstance(at_desk(work, task=Broken(), reward_on_failure=0.0), GroupFailure)


def test_parts_of_a_reward_become_tags(at_desk: Any, one_group: Any) -> None:
    def reward(prompt: int, index: int) -> Reward | float:
        return 0.5 if index == 3 else Reward(float(index), {"acc": index / 2, **({"style": 1.0} if index else {})})

    group = at_desk(one_group, task=FakeTask(reward=reward))
    assert group.rewards == (0.0, 1.0, 2.0, 0.5)
    assert group.sample_tag("acc") == (0.0, 0.5, 1.0, None)
    assert group.sample_tag("style") == (None, 1.0, 1.0, None)


def test_an_extra_of_another_kind_than_its_siblings_fails_its_sample(at_desk: Any, grant: Any) -> None:
    """FOUND-I3: of another dtype or width; also in a group all of another kind than the groups before it."""

    class Seeing(FakeTask):
        extras = ("image",)

    def reward(prompt: int, index: int) -> Reward:
        odd = {0: torch.zeros(2, 3, dtype=torch.float64), 1: torch.zeros(2, 4)}
        return Reward(1.0, extras={"image": odd.get(index + (4 if prompt == 0 else 0), torch.zeros(2 + index, 3))})

    async def work(desk: Any) -> list[Message]:
        await desk.collector.grant([grant(0)])
        await desk.hear(1)
        await desk.collector.grant([grant(1)])
        return list(await desk.hear(2))

    first, second = at_desk(work, task=Seeing(reward=reward))
    assert isinstance(first, PutNotice)
    assert isinstance(second, PutNotice)
    assert first.group.statuses == ("finished",) * 4
    assert second.group.statuses == ("failed", "failed", "finished", "finished")
    assert second.group.sample_tag("cause") == ("score_error", "score_error", None, None)
    assert second.errors == (
        "extra 'image' is float64 of shape (n, 3); its siblings' are float32 of shape (n, 3)",
        "extra 'image' is float32 of shape (n, 4); its siblings' are float32 of shape (n, 3)",
    )


@pytest.mark.parametrize("give", [lambda: sys.exit(1), lambda: [1, 2], lambda: np.float64(1.0)])
def test_a_tagger_that_fails_or_gives_no_plain_value_fails_its_group_by_name(
    at_desk: Any, grant: Any, give: Callable[[], Any]
) -> None:
    """FOUND-C14: a filter's function runs in the collector; the put must not be what notices."""

    async def work(desk: Any) -> Any:
        await desk.collector.grant([grant(0)])
        return (await desk.hear(1))[0]

    failure = at_desk(work, taggers={"style": lambda tokens: give()})
    assert isinstance(failure, GroupFailure)
    assert failure.reason == "tagger_error"
    assert "'style'" in failure.error
