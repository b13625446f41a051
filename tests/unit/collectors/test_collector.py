"""The collector around a fake generator: seeds, scores, tags, refused puts, versions."""

import asyncio
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from asyncrl.collectors.collector import Collector, CollectorSettings, sample_seed
from asyncrl.collectors.generators.base import Completion, GroupRequest
from asyncrl.collectors.outcome import Rules
from asyncrl.collectors.scoring import AsyncScorer, Scorer
from asyncrl.collectors.tasks import Reward, Task
from asyncrl.engine.aio.virtual_time import run_virtual, virtual_clock
from asyncrl.engine.data_plane.base import Partition
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.errors import GenerationError, StoreFull, VersionError
from asyncrl.engine.model.tokenizer import CharTokenizer
from asyncrl.engine.records import Grant, GroupMeta, Prompt
from asyncrl.engine.records.columns import COLUMNS, LOGPROBS, TOKENS
from asyncrl.engine.records.message import GroupFailure, Message, PutNotice, Served
from asyncrl.engine.simulate.virtual_loop import in_place_scorer
from asyncrl.engine.testing.fakes import FakeGenerator, FakeTask, FaultyPlane
from asyncrl.engine.weights.base import InProcess, Offer


@dataclass
class Desk:
    """A collector at work, and what it says."""

    collector: Collector
    plane: LocalPlane
    generator: Any
    messages: list[Message] = field(default_factory=list)

    async def hear(self, count: int) -> list[Message]:
        """Return the first `count` messages."""
        while len(self.messages) < count:
            numbered = await self.collector.events(len(self.messages), 1e6)
            self.messages += [message for _, message in numbered]
        return self.messages


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


def at_desk(
    work: Callable[[Desk], Any],
    *,
    task: Task | None = None,
    generator: Any = None,
    before_put: Callable[[int], Any] | None = None,
    scorer: Scorer | None = None,
    taggers: dict[str, Any] | None = None,
    put_timeout_s: float = 30.0,
    group_timeout_s: float = 60.0,
    queue_timeout_s: float = 300.0,
    oversample: int = 0,
    reward_on_failure: float | None = None,
) -> Any:
    """Run `work` beside a collector, in virtual time."""

    async def main() -> Any:
        plane = LocalPlane(clock=virtual_clock)
        await plane.register(Partition("train", 4, (*COLUMNS, *(task.extras if task else ())), ("trainer",)))
        used = generator or FakeGenerator()
        collector = Collector(
            "collector0",
            CollectorSettings(
                "train", 0.7, 5, queue_timeout_s, group_timeout_s, put_timeout_s, oversample, reward_on_failure
            ),
            generator=used,
            scorer=scorer or in_place_scorer(task or FakeTask()),
            tokenizer=CharTokenizer(),
            plane=FaultyPlane(plane, {"put": before_put} if before_put else {}),
            transport=InProcess(),
            taggers=taggers,
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collector.run)
            result = await work(Desk(collector, plane, used))
            tasks.cancel_scope.cancel()
        return result

    return run_virtual(main)


def grant(group: int, *, seed: int = 3) -> Grant:
    return Grant(group, Prompt(group % 4, f"{group % 4}>", str(group % 4), "fake"), 4, seed)


async def one_group(desk: Desk) -> GroupMeta:
    await desk.collector.grant([grant(0)])
    (message,) = await desk.hear(1)
    assert isinstance(message, PutNotice)
    return message.group


def test_the_seed_of_a_sample_is_a_function_of_run_group_and_index() -> None:
    seeds = {(s, g, i): sample_seed(s, g, i) for s in range(4) for g in range(4) for i in range(4)}
    assert len(set(seeds.values())) == 64
    assert all(sample_seed(*place) == seed for place, seed in seeds.items())
    assert all(0 <= seed < 2**64 for seed in seeds.values())


def test_the_generator_gets_the_prompt_and_one_seed_a_sample() -> None:
    requests: list[GroupRequest] = []

    class Noting(FakeGenerator):
        async def generate(self, request: GroupRequest) -> Sequence[Completion]:
            requests.append(request)
            return await super().generate(request)

    async def work(desk: Desk) -> None:
        await desk.collector.grant([grant(6, seed=9), grant(7, seed=9)])
        await desk.hear(2)

    at_desk(work, generator=Noting())
    for number, request in zip((6, 7), requests, strict=True):
        assert request.prompt_ids == tuple(CharTokenizer().encode(f"{number % 4}>"))
        assert request.seeds == tuple(sample_seed(9, number, i) for i in range(4))
        assert (request.temperature, request.max_new_tokens) == (0.7, 5)


def test_a_surplus_has_the_seeds_behind_those_of_the_group() -> None:
    class Late(FakeGenerator):
        async def generate(self, request: GroupRequest) -> Sequence[Completion]:
            assert request.seeds == tuple(sample_seed(3, 0, i) for i in range(6))
            return (await super().generate(request))[::-1]

    group = at_desk(one_group, generator=Late(), oversample=2)
    assert group.keys == ("v0_p0_g0", "v0_p0_g1", "v0_p0_g2", "v0_p0_g3")


def test_a_group_is_put_whole_with_its_tags_and_columns() -> None:
    async def work(desk: Desk) -> tuple[GroupMeta, dict[str, list[Any]]]:
        group = await one_group(desk)
        return group, await desk.plane.read("train", group.keys, COLUMNS)

    group, columns = at_desk(work)
    assert group.keys == ("v0_p0_g0", "v0_p0_g1", "v0_p0_g2", "v0_p0_g3")
    assert dict(group.tags) == {
        "group": 0,
        "prompt": 0,
        "dataset": "fake",
        "version": 0,
        "end_version": 0,
        "prompt_tokens": 2,
        "response_tokens": [2, 2, 2, 2],
        "trainable_tokens": [2, 2, 2, 2],
        "reward": [0.0, 1.0, 0.0, 1.0],
        "status": ["finished"] * 4,
        "cause": [None] * 4,
        "distinct_responses": 4,
    }
    encode = CharTokenizer().encode
    assert [row.tolist() for row in columns[TOKENS]] == [[*encode("0>"), *encode(str(i)), 1] for i in range(4)]
    assert all(row.dtype == torch.float32 and row.tolist() == [-1.0, -1.0] for row in columns[LOGPROBS])


class SaysItOddly(FakeGenerator):
    """Answers with tokens that no tokenizer would make of their text: `3` is one token, and so is the end."""

    response = (CharTokenizer.eos_id, 5, CharTokenizer.eos_id, CharTokenizer.eos_id)

    async def generate(self, request: GroupRequest) -> Sequence[Completion]:
        size = len(self.response)
        return [Completion(self.response, (-1.0,) * size, ((0, 0, size),), True) for _ in request.seeds]


def test_what_is_stored_are_the_tokens_that_were_sampled_and_never_their_text_encoded_again() -> None:
    """CASE-G7: tokens whose text encodes to others; as many log-probabilities as tokens."""

    async def work(desk: Desk) -> dict[str, list[Any]]:
        return await desk.plane.read("train", (await one_group(desk)).keys, COLUMNS)

    made = SaysItOddly.response
    assert CharTokenizer().encode(CharTokenizer().decode(list(made))) != list(made)
    columns = at_desk(work, generator=SaysItOddly())
    assert {tuple(row.tolist()) for row in columns[TOKENS]} == {(*CharTokenizer().encode("0>"), *made)}
    assert {len(row) for row in columns[LOGPROBS]} == {len(made)}


def test_a_score_that_raises_fails_its_sample_alone() -> None:
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


class OddLogprobs(FakeGenerator):
    """Replaces the log-probabilities of the samples in `odd`."""

    odd: dict[int, tuple[float, ...]]

    async def generate(self, request: GroupRequest) -> Sequence[Completion]:
        completions = await super().generate(request)
        return [replace(c, logprobs=self.odd.get(i, c.logprobs)) for i, c in enumerate(completions)]


def odd_generator(odd: dict[int, tuple[float, ...]]) -> OddLogprobs:
    generator = OddLogprobs()
    generator.odd = odd
    return generator


def test_a_completion_whose_logprobs_are_not_finite_or_too_few_fails_alone() -> None:
    """CASE-G7, invariant 10: such numbers reach no loss, and the rewards beside them count on."""
    odd = {0: (-0.5, math.nan), 1: (-math.inf, -0.5), 3: (-0.5,)}
    group = at_desk(one_group, generator=odd_generator(odd))
    assert group.statuses == ("failed", "failed", "finished", "failed")
    assert group.sample_tag("cause") == ("bad_logprobs", "bad_logprobs", None, "bad_logprobs")
    assert [reward is None for reward in group.rewards] == [True, True, False, True]
    assert group.trainable_tokens == (0, 0, 2, 0)


def test_a_group_without_one_sound_completion_is_a_failure_that_says_why() -> None:
    async def hear(desk: Desk) -> Message:
        await desk.collector.grant([grant(0)])
        return (await desk.hear(1))[0]

    failure = at_desk(hear, generator=odd_generator(dict.fromkeys(range(4), (-0.5, math.nan))))
    assert isinstance(failure, GroupFailure)
    assert failure.reason == "generation_error"
    assert "the log-probability of token 1 is nan" in failure.error


def test_a_score_without_a_declared_extra_fails_its_sample_alone() -> None:
    class Seeing(FakeTask):
        extras = ("image",)

    def reward(prompt: int, index: int) -> Reward:
        return Reward(1.0, extras={"image": torch.full((2,), index)} if index else {})

    async def work(desk: Desk) -> tuple[GroupMeta, list[Any]]:
        group = await one_group(desk)
        return group, (await desk.plane.read("train", group.keys, ["image"]))["image"]

    group, images = at_desk(work, task=Seeing(reward=reward))
    assert group.statuses == ("failed", "finished", "finished", "finished")
    assert [image.tolist() for image in images] == [[], [1, 1], [2, 2], [3, 3]]


def test_async_scores_run_together_and_fail_alone() -> None:
    task = AsyncTask()

    async def work(desk: Desk) -> tuple[GroupMeta, float]:
        return await one_group(desk), virtual_clock()

    group, seconds = at_desk(work, task=task)
    assert group.rewards == (0.0, 1.0, None, 3.0)
    assert group.statuses[2] == "failed"
    assert task.finished == [3, 1, 0]
    assert seconds == pytest.approx(1 + 10)


def test_a_score_that_never_answers_fails_its_sample_at_its_deadline() -> None:
    """CASE-B4's kind, FOUND-C13: the sample fails as `score_timeout`, its siblings and the next group go on."""
    task = AsyncTask(hang=True)

    async def work(desk: Desk) -> list[Message]:
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


def test_a_configured_reward_stands_in_for_a_score_that_failed_and_its_cause_stays() -> None:
    async def work(desk: Desk) -> Message:
        await desk.collector.grant([grant(0)])
        return (await desk.hear(1))[0]

    put = at_desk(work, task=AsyncTask(), reward_on_failure=-0.5)
    assert isinstance(put, PutNotice)
    assert put.group.rewards == (0.0, 1.0, -0.5, 3.0)
    assert put.group.statuses[2] == "finished"
    assert put.group.sample_tag("cause") == (None, None, "score_error", None)
    assert "judge is down" in put.errors[0]


def test_a_configured_reward_hides_no_score_that_always_fails() -> None:
    async def work(desk: Desk) -> Message:
        await desk.collector.grant([grant(0)])
        return (await desk.hear(1))[0]

    class Broken(FakeTask):
        def score(self, prompt: Prompt, response: str) -> float:
            raise ValueError("broken")

    assert isinstance(at_desk(work, task=Broken(), reward_on_failure=0.0), GroupFailure)


def test_parts_of_a_reward_become_tags() -> None:
    def reward(prompt: int, index: int) -> Reward | float:
        return 0.5 if index == 3 else Reward(float(index), {"acc": index / 2, **({"style": 1.0} if index else {})})

    group = at_desk(one_group, task=FakeTask(reward=reward))
    assert group.rewards == (0.0, 1.0, 2.0, 0.5)
    assert group.sample_tag("acc") == (0.0, 0.5, 1.0, None)
    assert group.sample_tag("style") == (None, 1.0, 1.0, None)


def test_a_generation_that_raises_is_one_failure_with_its_traceback() -> None:
    """CASE-B9, CASE-B1: the message carries the original error; siblings of the queue go on."""

    def fail(call: int) -> None:
        if call == 1:
            raise ValueError("the engine broke")

    async def work(desk: Desk) -> list[Message]:
        await desk.collector.grant([grant(i) for i in range(4)])
        return list(await desk.hear(4))

    messages = at_desk(work, generator=FakeGenerator(fail=fail))
    failures = [m for m in messages if isinstance(m, GroupFailure)]
    assert [(f.group, f.reason) for f in failures] == [(1, "generation_error")]
    assert "the engine broke" in failures[0].error
    assert "Traceback" in failures[0].error
    assert {m.group.group for m in messages if isinstance(m, PutNotice)} == {0, 2, 3}


def test_a_refused_put_is_tried_again_with_growing_pauses() -> None:
    """The store is full five times; nothing is lost, and the retries do not hammer it."""
    times: list[float] = []

    def full(call: int) -> None:
        times.append(virtual_clock())
        if call <= 5:
            raise StoreFull("no room")

    async def work(desk: Desk) -> list[str]:
        await one_group(desk)
        return await desk.plane.keys("train")

    assert len(at_desk(work, before_put=full)) == 4
    pauses = [b - a for a, b in itertools.pairwise(times)]
    assert len(pauses) == 5
    assert all(later >= 1.5 * earlier for earlier, later in itertools.pairwise(pauses))


@pytest.mark.parametrize("deadline", [3.0, 60.0])
def test_a_store_that_stays_full_ends_the_collector_at_its_deadline(deadline: float) -> None:
    def full(call: int) -> None:
        raise StoreFull("no room")

    async def work(desk: Desk) -> None:
        await desk.collector.grant([grant(0)])
        with pytest.raises(ExceptionGroup) as caught:
            await desk.hear(1)
        assert caught.group_contains(StoreFull)
        assert virtual_clock() == pytest.approx(1 + deadline)
        assert await desk.plane.keys("train") == []

    with pytest.raises(BaseExceptionGroup) as ended:
        at_desk(work, before_put=full, put_timeout_s=deadline)
    assert ended.group_contains(StoreFull)


def test_a_group_carries_the_version_served_when_it_was_granted() -> None:
    """CASE-A2: version 3 at dispatch, 4 loaded while it generates: keys and tag say 3."""
    generator = FakeGenerator(version=3, seconds=lambda _: 10.0)

    async def work(desk: Desk) -> GroupMeta:
        desk.collector.set_weight_version(3)
        await desk.collector.grant([grant(0)])
        await anyio.sleep(5)
        await desk.collector.update_weights(4, Offer({}))
        messages = await desk.hear(3)
        assert messages[:2] == [Served(3), Served(4)]
        notice = messages[2]
        assert isinstance(notice, PutNotice)
        return notice.group

    group = at_desk(work, generator=generator)
    assert (group.version, group.keys[0]) == (3, "v3_p0_g0")


def test_the_version_never_goes_back() -> None:
    """CASE-A5: 57, then 1, by either way in; nothing reaches the generator."""

    async def work(desk: Desk) -> list[int]:
        desk.collector.set_weight_version(57)
        with pytest.raises(VersionError, match=r"57.*1"):
            desk.collector.set_weight_version(1)
        with pytest.raises(VersionError, match=r"57.*1"):
            await desk.collector.update_weights(1, Offer({}))
        assert (await desk.collector.status())["version"] == 57
        return list(desk.generator.updates)

    assert at_desk(work) == []


def test_a_failed_update_leaves_the_version_served() -> None:
    """CASE-A6: the hook raises on its second call."""

    def refuse(version: int) -> float:
        if version == 2:
            raise RuntimeError("half a checkpoint")
        return 0.0

    async def work(desk: Desk) -> tuple[Any, GroupMeta]:
        await desk.collector.update_weights(1, Offer({}))
        with pytest.raises(RuntimeError, match="half a checkpoint"):
            await desk.collector.update_weights(2, Offer({}))
        await desk.collector.grant([grant(0)])
        served, notice = await desk.hear(2)
        assert isinstance(notice, PutNotice)
        return served, notice.group

    served, group = at_desk(work, generator=FakeGenerator(refuse=refuse))
    assert served == Served(1)
    assert group.version == 1


def test_stopping_leaves_nothing_running_and_nothing_half_put() -> None:
    async def work(desk: Desk) -> None:
        await desk.collector.grant([grant(0), grant(1)])
        await anyio.sleep(0.5)
        assert (await desk.collector.status())["running"] == 2
        await desk.collector.stop()
        status = await desk.collector.status()
        assert (status["running"], status["in_flight"]) == (0, 0)
        assert await desk.plane.keys("train") == []

    at_desk(work)


def test_an_extra_of_another_kind_than_its_siblings_fails_its_sample() -> None:
    """FOUND-I3: of another dtype or width; also in a group all of another kind than the groups before it."""

    class Seeing(FakeTask):
        extras = ("image",)

    def reward(prompt: int, index: int) -> Reward:
        odd = {0: torch.zeros(2, 3, dtype=torch.float64), 1: torch.zeros(2, 4)}
        return Reward(1.0, extras={"image": odd.get(index + (4 if prompt == 0 else 0), torch.zeros(2 + index, 3))})

    async def work(desk: Desk) -> list[Message]:
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


def test_a_log_probability_that_is_none_fails_its_sample_alone() -> None:
    """FOUND-I6."""
    group = at_desk(one_group, generator=odd_generator({1: (-0.5, None)}))  # type: ignore[dict-item]
    assert group.statuses == ("finished", "failed", "finished", "finished")
    assert group.sample_tag("cause") == (None, "bad_logprobs", None, None)


@pytest.mark.parametrize(
    "error", [SystemExit(0), KeyboardInterrupt(), asyncio.CancelledError(), KeyError("a")], ids=repr
)
def test_whatever_a_generator_raises_is_the_failure_of_its_group(error: BaseException) -> None:
    """FOUND-L6, FOUND-C14: a cancellation that leaks from an engine's client is not ours; the next group goes on."""

    def fail(call: int) -> None:
        if call == 0:
            raise error

    async def work(desk: Desk) -> list[Message]:
        await desk.collector.grant([grant(0)])
        await desk.hear(1)
        await desk.collector.grant([grant(1)])
        return list(await desk.hear(2))

    failure, notice = at_desk(work, generator=FakeGenerator(fail=fail))
    assert isinstance(failure, GroupFailure)
    assert failure.reason == "generation_error"
    assert failure.error.startswith("prompt 0: ")
    assert type(error).__name__ in failure.error
    assert isinstance(notice, PutNotice)


@pytest.mark.parametrize("give", [lambda: sys.exit(1), lambda: [1, 2], lambda: np.float64(1.0)])
def test_a_tagger_that_fails_or_gives_no_plain_value_fails_its_group_by_name(give: Callable[[], Any]) -> None:
    """FOUND-C14: a filter's function runs in the collector; the put must not be what notices."""

    async def work(desk: Desk) -> Message:
        await desk.collector.grant([grant(0)])
        return (await desk.hear(1))[0]

    failure = at_desk(work, taggers={"style": lambda tokens: give()})
    assert isinstance(failure, GroupFailure)
    assert failure.reason == "tagger_error"
    assert "'style'" in failure.error


@dataclass
class Queueing(FakeGenerator):
    """Begins each group when those before it are done."""

    turns: anyio.Semaphore = field(default_factory=lambda: anyio.Semaphore(1))

    async def generate(self, request: GroupRequest) -> Sequence[Completion]:
        async with self.turns:
            return await super().generate(request)


@pytest.mark.parametrize("limit", [25.0, 1000.0])
def test_a_group_that_waits_for_its_turn_has_another_limit_than_one_that_decodes(limit: float) -> None:
    """FOUND-C10, FOUND-C13: four groups of 10 s each, one at a time, with 15 s to decode and `limit` to wait."""

    async def work(desk: Desk) -> list[Message]:
        await desk.collector.grant([grant(i) for i in range(4)])
        return list(await desk.hear(4))

    messages = at_desk(
        work,
        generator=Queueing(seconds=lambda _: 10.0),
        group_timeout_s=15.0,
        queue_timeout_s=limit,
    )
    failures = [(m.group, m.reason) for m in messages if isinstance(m, GroupFailure)]
    assert failures == ([] if limit > 30 else [(3, "queue_timeout")])


class EndsWithAnError(FakeGenerator):
    """Raises when it is cancelled, as an engine does whose own loop was cancelled beside it."""

    async def generate(self, request: GroupRequest) -> Any:
        try:
            await anyio.sleep_forever()
        except BaseException:
            raise GenerationError("the engine has stopped") from None


def test_an_engine_that_is_cancelled_beside_its_groups_is_not_why_the_run_ends() -> None:
    async def work(desk: Desk) -> None:
        await desk.collector.grant([grant(0)])
        await anyio.sleep(1.0)

    at_desk(work, generator=EndsWithAnError())
