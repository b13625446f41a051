"""Where a task scores: in the collector's event loop, in its threads, or in processes (`score_process.py`).

Invariant: each response gets a reward that the task gave, or a failure with its cause; a score that
fails or hangs takes no sibling with it. Cancellation from outside goes through.
"""

import math
import signal
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import anyio
from anyio.lowlevel import checkpoint

from asyncrl.collectors.outcome import Outcome, Rules, judged, plain_reward
from asyncrl.collectors.tasks.base import Task
from asyncrl.engine.aio.call_in import CallIn, call_here
from asyncrl.engine.records import Prompt


class Scorer(Protocol):
    """What a collector asks of scoring."""

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[Outcome]:
        """Return one outcome per response, in order."""

    def close(self) -> None:
        """End whatever still scores; called once, when nothing is asked any more."""


class AsyncScorer:
    """A task whose `score` is async: all responses of a group at once, each in a task group of its own."""

    def __init__(self, task: Task, rules: Rules) -> None:
        self._task: Any = task
        self._rules = rules

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}

        async def score_one(i: int) -> None:
            try:
                outcomes[i] = plain_reward(await self._task.score(prompt, responses[i]), self._task, self._rules)
            except anyio.get_cancelled_exc_class():
                raise  # Ours or leaked: `isolated` tells.
            except BaseException as error:  # The edge of user code.
                outcomes[i] = self._rules.failed(error)

        async def isolated(i: int) -> None:
            # A cancellation that leaks from a judge's client ends the innermost task group, and nothing else.
            with anyio.move_on_after(self._rules.timeout_s) as limit:
                async with anyio.create_task_group() as own:
                    own.start_soon(score_one, i)
            if i not in outcomes:
                leaked = "score was cancelled by its own code: a cancellation came out of it, and nobody asked for one"
                outcomes[i] = self._rules.late() if limit.cancel_called else self._rules.failed(leaked)

        async with anyio.create_task_group() as tasks:
            for i in range(len(responses)):
                tasks.start_soon(isolated, i)
        return [outcomes[i] for i in range(len(responses))]

    def close(self) -> None:
        pass


class InPlaceScorer:
    """A task that scores while the event loop waits, for `runtime: local` and virtual time: one order for one seed.

    It scores in the loop's thread; `call_in` gives another, where alarms arrive in that one alone.
    """

    def __init__(self, task: Task, rules: Rules, *, call_in: CallIn = call_here) -> None:
        self._task = task
        self._rules = rules
        self._call_in = call_in

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[Outcome]:
        await checkpoint()
        return self._call_in(lambda: [self._judged(prompt, response) for response in responses])

    def _judged(self, prompt: Prompt, response: str) -> Outcome:
        outcome: Outcome | None = None
        alarm = Alarm(self._rules.timeout_s)
        try:
            with alarm:
                outcome = judged(self._task, prompt, response, self._rules)
        except _Interrupt:
            pass
        return self._rules.late() if alarm.rang or outcome is None else outcome

    def close(self) -> None:
        pass


class ThreadScorer:
    """A task that scores in threads of the collector's process, one response at a time per group.

    A score that takes too long is left to its thread, which nothing can end; `threads` such ones, and
    every score to come waits in vain and fails in its turn.
    """

    def __init__(self, task: Task, rules: Rules, *, threads: int = 32) -> None:
        self._task = task
        self._rules = rules
        self._limiter = anyio.CapacityLimiter(threads)

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[Outcome]:
        return [await self._judged(prompt, response) for response in responses]

    async def _judged(self, prompt: Prompt, response: str) -> Outcome:
        with anyio.move_on_after(self._rules.timeout_s):
            return await anyio.to_thread.run_sync(
                judged, self._task, prompt, response, self._rules, abandon_on_cancel=True, limiter=self._limiter
            )
        return self._rules.late()

    def close(self) -> None:
        pass


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
