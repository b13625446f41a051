"""Scores that raise anything, leak cancellations, hang or give no number: one sample fails, and its siblings go on."""

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from decimal import Decimal
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from asyncrl.collectors.outcome import Outcome, Rules, SampleFailure
from asyncrl.collectors.scoring import AsyncScorer, InPlaceScorer, Scorer, ThreadScorer
from asyncrl.collectors.tasks import Reward, Task
from asyncrl.engine.aio.virtual_time import run_virtual, virtual_clock
from asyncrl.engine.records import Prompt

PROMPT = Prompt(0, "0>")
RESPONSES = ["0", "1", "2", "3"]
JUDGE = Rules("my:Judge", timeout_s=20.0)


class Judge(Task):
    """Rewards 1, but for response 1, of which `odd` makes something else."""

    def __init__(self, odd: Callable[[], Any]) -> None:
        self.odd = odd

    def prompts(self) -> Sequence[Prompt]:
        return [PROMPT]

    def score(self, prompt: Prompt, response: str) -> Any:
        return self.odd() if response == "1" else 1.0


class AsyncJudge(Judge):
    """Takes a second, so that all scores are under way when the odd one goes wrong."""

    async def score(self, prompt: Prompt, response: str) -> Any:
        if response == "1":
            await anyio.sleep(0.5)
            return self.odd()
        await anyio.sleep(1)
        return 1.0


def rewards(outcomes: Sequence[Outcome]) -> list[float | None]:
    return [outcome.value if isinstance(outcome, Reward) else None for outcome in outcomes]


def scored(scorer: Scorer) -> list[Outcome]:
    return run_virtual(partial(scorer.score, PROMPT, RESPONSES))


def swallow() -> float:
    with suppress(Exception):
        time.sleep(30)
    return 0.0


def leak(error: Callable[[], BaseException]) -> Callable[[], Any]:
    def odd() -> Any:
        raise error()

    return odd


def cancelled() -> BaseException:
    return anyio.get_cancelled_exc_class()()


LEAKS = [
    (cancelled, "cancel"),
    (lambda: SystemExit(0), "SystemExit(0)"),
    (KeyboardInterrupt, "KeyboardInterrupt()"),
    (GeneratorExit, "GeneratorExit()"),
    (ZeroDivisionError, "ZeroDivisionError()"),
]


@pytest.mark.parametrize(("error", "words"), LEAKS)
@pytest.mark.parametrize("make", [InPlaceScorer, AsyncScorer])
def test_whatever_leaks_from_a_score_fails_its_sample_with_cause_and_task(make: Any, error: Any, words: str) -> None:
    """FOUND-L6, FOUND-I5, FOUND-C14: no reward is made up, neither for it nor for siblings that were not done."""
    task = (AsyncJudge if make is AsyncScorer else Judge)(leak(error))
    outcomes = scored(make(task, JUDGE))
    assert rewards(outcomes) == [1.0, None, 1.0, 1.0]
    failure = outcomes[1]
    assert isinstance(failure, SampleFailure)
    assert failure.cause == "score_error"
    assert "my:Judge" in failure.error
    assert words.lower() in failure.error.lower()


def test_a_score_that_cancels_its_own_task_fails_alone() -> None:
    """FOUND-L6: as clients do whose time-out is a cancellation that comes at the next wait."""
    import asyncio

    class Client(AsyncJudge):
        async def score(self, prompt: Prompt, response: str) -> Any:
            if response == "1":
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                return 0.25
            return await super().score(prompt, response)

    assert rewards(scored(AsyncScorer(Client(lambda: 0), JUDGE))) in ([1.0, 0.25, 1.0, 1.0], [1.0, None, 1.0, 1.0])


def test_a_cancellation_from_outside_goes_through_an_async_score() -> None:
    """FOUND-L6: a group that is cancelled does not come back as one whose samples failed."""

    async def main() -> tuple[bool, float, list[Any]]:
        outcomes: list[Any] = []
        with anyio.move_on_after(0.7) as scope:
            outcomes += await AsyncScorer(AsyncJudge(leak(cancelled)), JUDGE).score(PROMPT, RESPONSES)
        return scope.cancelled_caught, virtual_clock(), outcomes

    caught, seconds, outcomes = run_virtual(main)
    assert caught
    assert seconds == pytest.approx(0.7, abs=0.01)
    assert outcomes == []


def test_an_async_score_that_hangs_fails_its_sample_at_its_deadline() -> None:
    """FOUND-C13: with a limit per sample."""

    class Hung(AsyncJudge):
        async def score(self, prompt: Prompt, response: str) -> Any:
            await anyio.sleep(1e6 if response == "1" else 1)
            return 1.0

    outcomes = scored(AsyncScorer(Hung(lambda: 0), JUDGE))
    assert rewards(outcomes) == [1.0, None, 1.0, 1.0]
    late = "task my:Judge: score took longer than 20 s (collector.score_timeout_s)"
    assert outcomes[1] == SampleFailure("score_timeout", late)


@pytest.mark.parametrize(
    "odd",
    [
        lambda: time.sleep(30),
        lambda: re.fullmatch(r"(a+)+", "a" * 60 + "b"),
        swallow,
    ],
    ids=["sleeps", "backtracks", "swallows"],
)
def test_a_score_that_blocks_the_loop_is_interrupted_in_place(odd: Callable[[], Any]) -> None:
    """FOUND-C7: in one process too, by an alarm, which no `except Exception` takes."""
    start = time.monotonic()
    outcomes = scored(InPlaceScorer(Judge(odd), Rules("my:Judge", timeout_s=0.05)))
    assert time.monotonic() - start < 2
    assert rewards(outcomes) == [1.0, None, 1.0, 1.0]
    assert isinstance(outcomes[1], SampleFailure)
    assert outcomes[1].cause == "score_timeout"


def test_a_score_in_a_thread_that_hangs_fails_alone() -> None:
    """FOUND-C13, with `score_processes: 0`: what hangs is left behind, its siblings have threads of their own."""
    outcomes = anyio.run(
        ThreadScorer(Judge(lambda: time.sleep(2)), Rules("my:Judge", timeout_s=0.3)).score, PROMPT, RESPONSES
    )
    assert rewards(outcomes) == [1.0, None, 1.0, 1.0]


@pytest.mark.parametrize(
    "odd",
    ["1", b"1", bytearray(b"1"), None, np.str_("1"), np.array("1"), 1j, [1.0], Reward],
    ids=lambda odd: type(odd).__name__,
)
def test_what_is_no_number_by_its_type_is_no_reward(odd: Any) -> None:
    """FOUND-I1: text was taken for the number that it spells."""
    for give in (lambda: odd, lambda: Reward(1.0, {"style": odd}), lambda: Reward(odd)):
        outcomes = scored(InPlaceScorer(Judge(give), JUDGE))
        assert rewards(outcomes) == [1.0, None, 1.0, 1.0]
        assert "must be a number" in outcomes[1].error  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "number",
    [2, True, 0.5, np.float32(0.5), np.int64(3), np.bool_(True), torch.tensor(0.5), torch.tensor(True), Decimal("0.5")],
    ids=repr,
)
def test_numbers_of_every_library_are_rewards_and_come_as_floats(number: Any) -> None:
    """FOUND-I1: numbers, NumPy's and torch's scalars, and booleans are taken."""
    outcome = scored(InPlaceScorer(Judge(lambda: Reward(number, {"style": number})), JUDGE))[1]
    assert isinstance(outcome, Reward)
    assert (type(outcome.value), type(outcome.parts["style"])) == (float, float)
    assert outcome.value == float(number)


@pytest.mark.parametrize("name", ["spans", "log_ratio_max", "reward", "cause", 3, None, ("a",), "copied"])
def test_a_part_with_a_name_that_is_taken_or_no_name_fails_its_sample(name: Any) -> None:
    """FOUND-I2: `copied` is the tag of a filter's tagger here."""
    rules = Rules("my:Judge", taken=frozenset({"copied"}))
    outcomes = scored(InPlaceScorer(Judge(lambda: Reward(1.0, {name: 0.5})), rules))
    assert rewards(outcomes) == [1.0, None, 1.0, 1.0]
    assert repr(name) in outcomes[1].error  # type: ignore[union-attr]
