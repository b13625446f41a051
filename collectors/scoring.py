"""Where a task or a reward function scores: in the collector's event loop, in threads, or in processes.

The processes are in `score_process.py`.

Invariant: each response gets a reward that the user's code gave, or a failure with its cause; a score that
fails or hangs takes no sibling with it. Cancellation from outside goes through.
"""

import math
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import anyio
from anyio.lowlevel import checkpoint

from asyncrl.collectors.outcome import Outcome, Rules, all_failed, ask, judged, outcomes_of
from asyncrl.collectors.question import Judge, Question
from asyncrl.engine.aio.call_in import CallIn, call_here
from asyncrl.engine.records import Prompt


class Scorer(Protocol):
    """What a collector asks of scoring."""

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[Outcome]:
        """Return one outcome per response, in order."""

    def close(self) -> None:
        """End whatever still scores; called once, when nothing is asked any more."""


class Place(ABC):
    """Where user code runs. A call that fails or takes too long fails the responses of its question, and no others."""

    @abstractmethod
    async def ask(self, questions: Sequence[Question]) -> list[Outcome]:
        """Return one outcome per response of all questions, in order."""

    def close(self) -> None:  # noqa: B027
        """End whatever still scores."""

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[Outcome]:
        """Score each response alone."""
        return await self.ask([Question(prompt, (response,)) for response in responses])


class AsyncScorer(Place):
    """A judge whose `score` is async: all responses of a group at once, each in a task group of its own."""

    def __init__(self, judge: Judge, rules: Rules) -> None:
        self._judge: Any = judge
        self._rules = rules

    async def ask(self, questions: Sequence[Question]) -> list[Outcome]:
        outcomes: dict[int, list[Outcome]] = {}

        async def answer(i: int) -> None:
            try:
                given = await ask(self._judge, questions[i])
                outcomes[i] = outcomes_of(given, questions[i], self._judge, self._rules)
            except anyio.get_cancelled_exc_class():
                raise  # Ours or leaked: `isolated` tells.
            except BaseException as error:  # The edge of user code.
                outcomes[i] = all_failed(questions[i], self._rules.failed(error))

        async def isolated(i: int) -> None:
            # A cancellation that leaks from a judge's client ends the innermost task group, and nothing else.
            with anyio.move_on_after(self._rules.timeout_s) as limit:
                async with anyio.create_task_group() as own:
                    own.start_soon(answer, i)
            if i not in outcomes:
                leaked = "score was cancelled by its own code: a cancellation came out of it, and nobody asked for one"
                failure = self._rules.late() if limit.cancel_called else self._rules.failed(leaked)
                outcomes[i] = all_failed(questions[i], failure)

        async with anyio.create_task_group() as tasks:
            for i in range(len(questions)):
                tasks.start_soon(isolated, i)
        return [outcome for i in range(len(questions)) for outcome in outcomes[i]]


class InPlaceScorer(Place):
    """A judge that scores while the event loop waits, for `runtime: local` and virtual time: one order for one seed.

    It scores in the loop's thread; `call_in` gives another, where alarms arrive in that one alone.
    """

    def __init__(self, judge: Judge, rules: Rules, *, call_in: CallIn = call_here) -> None:
        self._judge = judge
        self._rules = rules
        self._call_in = call_in

    async def ask(self, questions: Sequence[Question]) -> list[Outcome]:
        await checkpoint()
        return self._call_in(lambda: [outcome for question in questions for outcome in self._answer(question)])

    def _answer(self, question: Question) -> list[Outcome]:
        outcomes: list[Outcome] = []
        alarm = Alarm(self._rules.timeout_s)
        try:
            with alarm:
                outcomes = judged(self._judge, question, self._rules)
        except _Interrupt:
            pass
        return all_failed(question, self._rules.late()) if alarm.rang or not outcomes else outcomes


class ThreadScorer(Place):
    """A judge that scores in threads of the collector's process, one response at a time per group.

    A score that takes too long is left to its thread, which nothing can end; `threads` such ones, and
    every score to come waits in vain and fails in its turn.
    """

    def __init__(self, judge: Judge, rules: Rules, *, threads: int = 32) -> None:
        self._judge = judge
        self._rules = rules
        self._limiter = anyio.CapacityLimiter(threads)

    async def ask(self, questions: Sequence[Question]) -> list[Outcome]:
        return [outcome for question in questions for outcome in await self._answer(question)]

    async def _answer(self, question: Question) -> list[Outcome]:
        with anyio.move_on_after(self._rules.timeout_s):
            return await anyio.to_thread.run_sync(
                judged, self._judge, question, self._rules, abandon_on_cancel=True, limiter=self._limiter
            )
        return all_failed(question, self._rules.late())


class _Interrupt(BaseException):
    """Raised inside a score by the alarm: no `except Exception` of the user's takes it."""


# A bare `except:` may take it all the same: the alarm rings again.
_AGAIN_S = 1.0
# Within what the kernel's timers take.
_LONGEST_S = 1e6


class Alarm:
    """Interrupts what runs inside it after `limit_s`, by a signal; `rang` tells.

    It ends what returns to the interpreter now and then: sleeps, loops, regular expressions. Outside the main
    thread, where no signal arrives, or without a limit, it does nothing.
    """

    def __init__(self, limit_s: float) -> None:
        self.rang = False
        self._limit_s = limit_s
        self._set = math.isfinite(limit_s) and threading.current_thread() is threading.main_thread()
        self._before: Any = signal.SIG_DFL
        self._others = (0.0, 0.0)

    def __enter__(self) -> None:
        if self._set:
            self._before = signal.signal(signal.SIGALRM, self._ring)
            self._others = signal.setitimer(signal.ITIMER_REAL, min(self._limit_s, _LONGEST_S), _AGAIN_S)

    def __exit__(self, *_: object) -> None:
        if not self._set:
            return
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            # Also if it rang at this very moment: the next ring would come only after _AGAIN_S.
            signal.setitimer(signal.ITIMER_REAL, *self._others)
            signal.signal(signal.SIGALRM, self._before)

    def _ring(self, signum: int, frame: Any) -> None:
        self.rang = True
        raise _Interrupt
