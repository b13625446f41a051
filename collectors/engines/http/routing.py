"""Which replica a request goes to: of those that are up, the one with the fewest requests outstanding.

Invariant: each request that goes out comes back once, to the same replica's count.
"""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import anyio

from asyncrl.collectors.engines.http.client import ServerDown
from asyncrl.collectors.engines.http.server import Server

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Replica:
    """A server, how many requests are out at it, and why it is not `up`.

    `holds` is the version that it was seen to compute with; None if that is not known.
    """

    server: Server
    url: str
    up: bool = False
    outstanding: int = 0
    holds: int | None = None
    cause: str = ""
    waits: set[anyio.CancelScope] = field(default_factory=set)

    async def next(self, items: AsyncGenerator[T, None]) -> T | None:
        """Return what comes next, None at the end; ServerDown once the replica is left out, as one is that hangs."""
        with anyio.CancelScope() as scope:
            self.waits.add(scope)
            try:
                return await anext(items, None)
            finally:
                self.waits.discard(scope)
        raise ServerDown(f"{self.url} was left out: {self.cause}")

    def leave_out(self, cause: str) -> None:
        """Route nothing to it, and let nobody wait for it."""
        self.up, self.cause = False, cause
        for scope in self.waits:
            scope.cancel()


class Router:
    """Routes over replicas, each of which takes `rows` requests at once."""

    def __init__(self, replicas: Sequence[Replica], rows: int) -> None:
        self._replicas = tuple(replicas)
        self._rows = rows

    @property
    def replicas(self) -> tuple[Replica, ...]:
        return self._replicas

    @property
    def up(self) -> list[Replica]:
        return [replica for replica in self._replicas if replica.up]

    @property
    def causes(self) -> str:
        """Why each replica that is not up is not, in words."""
        out = (replica for replica in self._replicas if not replica.up)
        return "; ".join(replica.cause or f"{replica.url} was not asked yet" for replica in out)

    def limit(self) -> int:
        """Return how many requests the replicas that are up take at once."""
        return self._rows * len(self.up)

    def least(self) -> Replica | None:
        """Return where the next request goes; the first of equals; None if no replica is up.

        Example: of replicas with 3, 1 and 1 requests outstanding it is the second.
        """
        return min(self.up, key=lambda replica: replica.outstanding, default=None)

    @contextmanager
    def out(self, replica: Replica) -> Iterator[None]:
        """Count a request as outstanding for the length of the context."""
        replica.outstanding += 1
        try:
            yield
        finally:
            replica.outstanding -= 1
