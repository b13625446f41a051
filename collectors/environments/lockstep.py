"""Turns of samples that were granted together, in step: one batch per turn, of all samples that still go on.

So the composition of every batch follows from the run's seed alone, as `max_staleness` 0 promises. A sample that ends,
or fails, leaves; nobody waits for it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import anyio

from asyncrl.collectors.engines.base import Request, Result
from asyncrl.engine.errors import GenerationError

Place = tuple[int, int]
"""Group, in the order in which they came, and sample."""


@dataclass(eq=False, slots=True)
class Batch:
    """The requests of one turn by place; their results, or what went wrong, once `done`."""

    requests: dict[Place, Request] = field(default_factory=dict)
    results: dict[Place, Result] = field(default_factory=dict)
    error: GenerationError | None = None
    done: anyio.Event = field(default_factory=anyio.Event)

    @property
    def places(self) -> list[Place]:
        """The order in which they decode."""
        return sorted(self.requests)


class Lockstep:
    """`samples` go on together; a batch is given to `send` once all that have not left ask for their next turn."""

    def __init__(self, samples: int, send: Callable[[Batch], None]) -> None:
        self._going = samples
        self._groups = 0
        self._send = send
        self._gathering = Batch()

    @property
    def over(self) -> bool:
        return not self._going

    def join(self) -> int:
        """Return the place of the next group."""
        self._groups += 1
        return self._groups - 1

    async def turn(self, place: Place, request: Request) -> Result:
        """Return the result of a sample's next turn; GenerationError if its batch failed."""
        batch = self._gathering
        batch.requests[place] = request
        self._send_if_all_ask()
        try:
            await batch.done.wait()
        except BaseException:
            if batch is self._gathering:  # Cancelled before it was sent: the others go without.
                del batch.requests[place]
            raise
        if batch.error is not None:
            raise batch.error
        return batch.results[place]

    def leave(self, samples: int = 1) -> None:
        """Note that so many samples ask no more."""
        self._going -= samples
        self._send_if_all_ask()

    def _send_if_all_ask(self) -> None:
        if self._gathering.requests and len(self._gathering.requests) == self._going:
            batch, self._gathering = self._gathering, Batch()
            self._send(batch)
