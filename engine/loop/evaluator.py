"""When a run is evaluated, and what an evaluation that fails costs.

Invariant: an evaluation is of one version, whatever is trained and published beside it, and none of them ends training.
A step waits only while the weights are copied.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import anyio
import structlog
from anyio.abc import TaskGroup

from asyncrl.configs import RunConfig
from asyncrl.engine.deployment import EvaluationPart
from asyncrl.engine.errors import Overdue
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.types import EvaluationFailed
from asyncrl.engine.loop.examiner import Examiner
from asyncrl.engine.records.ending import Ending
from asyncrl.engine.records.scores import Scores
from asyncrl.engine.weights.base import Offer

log = structlog.get_logger()

OnScored = Callable[[int, Scores], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Schedule:
    """After how many steps evaluations come, and whether the first and the last version have one."""

    every: int
    at_start: bool
    at_end: bool
    copy_timeout_s: float
    stop_timeout_s: float

    @classmethod
    def of(cls, config: RunConfig) -> "Schedule":
        """Return the schedule of a configuration whose `evaluation.every` is a number."""
        asked = config.evaluation
        assert asked.every is not None
        return cls(
            asked.every,
            asked.at_start,
            asked.at_end,
            config.trainer.publish_timeout_s,
            config.supervision.stop_timeout_s,
        )

    def is_due(self, version: int) -> bool:
        return self.at_start if version == 0 else version % self.every == 0


class Evaluator:
    """Has `examiner` evaluate the versions that are due, one at a time; `on_scored` hears what each came to."""

    def __init__(
        self, schedule: Schedule, part: EvaluationPart, examiner: Examiner, *, events: EventLog, on_scored: OnScored
    ) -> None:
        self._schedule = schedule
        self._part = part
        self._examiner = examiner
        self._events = events
        self._on_scored = on_scored
        self._tasks: TaskGroup | None = None
        self._under_way: int | None = None
        self._over = anyio.Event()
        self._scope = anyio.CancelScope()
        self._evaluated: set[int] = set()
        self._given_up = False
        self._finishing = False

    @property
    def under_way(self) -> int | None:
        """The version that is evaluated now; None if none is."""
        return self._under_way

    @property
    def finishing(self) -> bool:
        """Whether training is done, and the run goes on for evaluations alone."""
        return self._finishing

    def start(self, tasks: TaskGroup) -> None:
        """Serve evaluations in `tasks`, which outlives training."""
        self._tasks = tasks
        tasks.start_soon(self._examiner.run)

    async def after_step(self, version: int) -> bool:
        """Begin to evaluate a version if that is due; return whether it began.

        The ranks hold that version until this returns. One that is due while another is evaluated is left out.
        """
        if not self._schedule.is_due(version):
            return False
        if self._under_way is not None:
            why = f"the evaluation of version {self._under_way} is still under way; raise evaluation.every"
            self._fail(version, why, skipped=True)
            return False
        return await self._begin(version)

    async def finish(self, ending: Ending, version: int) -> None:
        """Wait for the evaluation under way, evaluate the last version, and end the evaluator.

        After a run that was interrupted or failed nothing is waited for.
        """
        self._finishing = True
        if ending.code == 0 and not self._given_up:
            await self._until_over()
            if self._schedule.at_end and version not in self._evaluated and not self._given_up:
                await self._begin(version)
                await self._until_over()
        self.give_up()
        await self._until_over()
        with anyio.move_on_after(self._schedule.stop_timeout_s, shield=True) as limit:
            try:
                await self._examiner.stop()
            except Exception as error:  # The evaluator's edge: the run has its ending already.
                log.warning("the evaluator could not be stopped in order", error=repr(error))
        if limit.cancelled_caught:
            log.warning("the evaluator did not stop in time", timeout_s=self._schedule.stop_timeout_s)

    def give_up(self) -> None:
        """Let the evaluation under way go, and begin none any more."""
        self._given_up = True
        self._scope.cancel()

    async def _until_over(self) -> None:
        if self._under_way is not None:
            await self._over.wait()  # It ends by its own deadline.

    async def _begin(self, version: int) -> bool:
        assert self._tasks is not None, "start comes first"
        try:
            offer = await self._copy(version)
        except Exception as error:  # The evaluation's edge: training goes on.
            self._fail(version, repr(error))
            return False
        self._under_way, self._over, self._scope = version, anyio.Event(), anyio.CancelScope()
        self._evaluated.add(version)
        self._tasks.start_soon(self._evaluate, version, offer)
        return True

    async def _copy(self, version: int) -> Offer:
        limit_s, transport = self._schedule.copy_timeout_s, self._part.transport
        with anyio.move_on_after(limit_s):
            sent = await self._part.source.copy_weights(transport)
            return replace(transport.offer(sent, ()), twins=sent.twins)
        raise Overdue(f"version {version} was not copied within {limit_s:g} s (trainer.publish_timeout_s)")

    async def _evaluate(self, version: int, offer: Offer) -> None:
        try:
            with self._scope:
                ended = await self._examiner.examine(version, offer)
                log.info("evaluated", version=version, pass_at_1=ended.scores.pass_at_1, seconds=ended.seconds)
                await self._on_scored(version, ended.scores)
            if self._scope.cancelled_caught:
                self._fail(version, "the run ended")
        except Exception as error:  # The evaluation's edge: training goes on.
            self._fail(version, repr(error))
        finally:
            self._under_way = None
            self._over.set()

    def _fail(self, version: int, error: str, *, skipped: bool = False) -> None:
        self._events.append(EvaluationFailed(version=version, error=error, skipped=skipped))
        log.warning("a version is left without an evaluation", version=version, error=error)
