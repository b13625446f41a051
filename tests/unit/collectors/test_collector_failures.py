"""What a generator or the data plane does wrong: which sample, group or run ends by it."""

import asyncio
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
import pytest

from asyncrl.collectors.generators.base import Completion, GroupRequest
from asyncrl.engine.aio.virtual_time import virtual_clock
from asyncrl.engine.errors import GenerationError, StoreFull
from asyncrl.engine.records.message import GroupFailure, Message, PutNotice
from asyncrl.engine.testing.fakes import FakeGenerator


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


def test_a_completion_whose_logprobs_are_not_finite_or_too_few_fails_alone(at_desk: Any, one_group: Any) -> None:
    """CASE-G7, invariant 10: such numbers reach no loss, and the rewards beside them count on."""
    odd = {0: (-0.5, math.nan), 1: (-math.inf, -0.5), 3: (-0.5,)}
    group = at_desk(one_group, generator=odd_generator(odd))
    assert group.statuses == ("failed", "failed", "finished", "failed")
    assert group.sample_tag("cause") == ("bad_logprobs", "bad_logprobs", None, "bad_logprobs")
    assert [reward is None for reward in group.rewards] == [True, True, False, True]
    assert group.trainable_tokens == (0, 0, 2, 0)


def test_a_group_without_one_sound_completion_is_a_failure_that_says_why(at_desk: Any, grant: Any) -> None:
    async def hear(desk: Any) -> Any:
        await desk.collector.grant([grant(0)])
        return (await desk.hear(1))[0]

    failure = at_desk(hear, generator=odd_generator(dict.fromkeys(range(4), (-0.5, math.nan))))
    assert isinstance(failure, GroupFailure)
    assert failure.reason == "generation_error"
    assert "the log-probability of token 1 is nan" in failure.error


def test_a_generation_that_raises_is_one_failure_with_its_traceback(at_desk: Any, grant: Any) -> None:
    """CASE-B9, CASE-B1: the message carries the original error; siblings of the queue go on."""

    def fail(call: int) -> None:
        if call == 1:
            raise ValueError("the engine broke")

    async def work(desk: Any) -> list[Message]:
        await desk.collector.grant([grant(i) for i in range(4)])
        return list(await desk.hear(4))

    messages = at_desk(work, generator=FakeGenerator(fail=fail))
    failures = [m for m in messages if isinstance(m, GroupFailure)]
    assert [(f.group, f.reason) for f in failures] == [(1, "generation_error")]
    assert "the engine broke" in failures[0].error
    assert "Traceback" in failures[0].error
    assert {m.group.group for m in messages if isinstance(m, PutNotice)} == {0, 2, 3}


def test_a_refused_put_is_tried_again_with_growing_pauses(at_desk: Any, one_group: Any) -> None:
    """The store is full five times; nothing is lost, and the retries do not hammer it."""
    times: list[float] = []

    def full(call: int) -> None:
        times.append(virtual_clock())
        if call <= 5:
            raise StoreFull("no room")

    async def work(desk: Any) -> Any:
        await one_group(desk)
        return await desk.plane.keys("train")

    assert len(at_desk(work, before_put=full)) == 4
    pauses = [b - a for a, b in itertools.pairwise(times)]
    assert len(pauses) == 5
    assert all(later >= 1.5 * earlier for earlier, later in itertools.pairwise(pauses))


@pytest.mark.parametrize("deadline", [3.0, 60.0])
def test_a_store_that_stays_full_ends_the_collector_at_its_deadline(at_desk: Any, grant: Any, deadline: float) -> None:
    def full(call: int) -> None:
        raise StoreFull("no room")

    async def work(desk: Any) -> None:
        await desk.collector.grant([grant(0)])
        with pytest.raises(ExceptionGroup) as caught:
            await desk.hear(1)
        assert caught.group_contains(StoreFull)
        assert virtual_clock() == pytest.approx(1 + deadline)
        assert await desk.plane.keys("train") == []

    with pytest.raises(BaseExceptionGroup) as ended:
        at_desk(work, before_put=full, put_timeout_s=deadline)
    assert ended.group_contains(StoreFull)


def test_a_log_probability_that_is_none_fails_its_sample_alone(at_desk: Any, one_group: Any) -> None:
    """FOUND-I6."""
    group = at_desk(one_group, generator=odd_generator({1: (-0.5, None)}))  # type: ignore[dict-item]
    assert group.statuses == ("finished", "failed", "finished", "finished")
    assert group.sample_tag("cause") == (None, "bad_logprobs", None, None)


@pytest.mark.parametrize(
    "error", [SystemExit(0), KeyboardInterrupt(), asyncio.CancelledError(), KeyError("a")], ids=repr
)
def test_whatever_a_generator_raises_is_the_failure_of_its_group(
    at_desk: Any, grant: Any, error: BaseException
) -> None:
    """FOUND-L6, FOUND-C14: a cancellation that leaks from an engine's client is not ours; the next group goes on."""

    def fail(call: int) -> None:
        if call == 0:
            raise error

    async def work(desk: Any) -> list[Message]:
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


@dataclass
class Queueing(FakeGenerator):
    """Begins each group when those before it are done."""

    turns: anyio.Semaphore = field(default_factory=lambda: anyio.Semaphore(1))

    async def generate(self, request: GroupRequest) -> Sequence[Completion]:
        async with self.turns:
            return await super().generate(request)


@pytest.mark.parametrize("limit", [25.0, 1000.0])
def test_a_group_that_waits_for_its_turn_has_another_limit_than_one_that_decodes(
    at_desk: Any, grant: Any, limit: float
) -> None:
    """FOUND-C10, FOUND-C13: four groups of 10 s each, one at a time, with 15 s to decode and `limit` to wait."""

    async def work(desk: Any) -> list[Message]:
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


def test_an_engine_that_is_cancelled_beside_its_groups_is_not_why_the_run_ends(at_desk: Any, grant: Any) -> None:
    async def work(desk: Any) -> None:
        await desk.collector.grant([grant(0)])
        await anyio.sleep(1.0)

    at_desk(work, generator=EndsWithAnError())
