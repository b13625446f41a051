"""The run's watchdog: it looks at progress, whoever lives, and says who waits for whom when there is none.

Most waits have a deadline of their own, which names what was waited for. This one is behind all of them: an actor may
answer its long poll, and never the call on which the run waits.

Invariant: while `watch` runs, a run either moves or ends, a little later than its longest limit.
"""

from collections.abc import Callable
from typing import NoReturn

import anyio

from asyncrl.configs import RunConfig
from asyncrl.engine.errors import Overdue
from asyncrl.engine.events.types import (
    AnyEvent,
    BatchGivenUp,
    Evaluated,
    Judged,
    Measured,
    Published,
    Put,
    StepEnded,
    StepStarted,
)

# A driver that was suspended has missed one look, and not the whole limit.
_LOOKS = 10


class Watchdog:
    """A fold that counts what moves. `says` tells who waits for whom."""

    kinds = (Put, Judged, Measured, StepStarted, StepEnded, BatchGivenUp, Published, Evaluated)

    def __init__(self, limit_s: float, says: Callable[[], str]) -> None:
        self._limit_s = limit_s
        self._says = says
        self._moves = 0

    def apply(self, event: AnyEvent) -> None:
        self._moves += 1

    async def watch(self) -> NoReturn:
        """Raise Overdue once nothing has moved for the limit."""
        seen, still = self._moves, 0
        while still < _LOOKS:
            await anyio.sleep(self._limit_s / _LOOKS)
            still, seen = (still + 1 if self._moves == seen else 0), self._moves
        raise Overdue(f"nothing has moved for {self._limit_s:g} s: {self._says()}")


def longest_wait_s(config: RunConfig) -> float:
    """Return how long a run in order may be without progress, in seconds: its longest limit, and an answer's.

    Example: with the defaults a checkpoint may take 1800 s, and an answer 60 s, so it is 1860 s.
    """
    trainer, supervision = config.trainer, config.supervision
    longest = max(
        supervision.starve_timeout_s,
        supervision.start_timeout_s,
        config.rollout.gate_timeout_s,
        config.checkpoint.timeout_s,
        config.run.save_timeout_s,
        trainer.step_timeout_s * max(1, trainer.sft_warm_up_steps),
        trainer.publish_timeout_s * trainer.publish_tries,
    )
    return longest + supervision.answer_timeout_s
