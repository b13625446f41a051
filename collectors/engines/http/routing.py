"""Which replica a request goes to: of those that are up and have room, the one with the fewest outstanding.

Invariant: each request that goes out comes back once, to the same replica's count.
"""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import anyio

from asyncrl.collectors.engines.http.client import ServerDown
from asyncrl.collectors.engines.http.server import Server
from asyncrl.collectors.engines.in_flight import InFlightLimit

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Replica:
    """A server, how many requests are out at it and how many may be, and why it is not `up`.

    `holds` is the version that it was seen to compute with; None if that is not known. `tells` whether it says how full
    its cache is, of which `cache_used` is the share in use.
    """

    server: Server
    url: str
    in_flight: InFlightLimit
    up: bool = False
    outstanding: int = 0
    holds: int | None = None
    cause: str = ""
    tells: bool = True
    cache_used: float = 0.0
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
    """Routes over replicas, each of which takes so many requests at once as its own limit says."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = tuple(replicas)

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
        return sum(replica.in_flight.limit for replica in self.up)

    def least(self) -> Replica | None:
        """Return where the next request goes; the first of equals; None if no replica is up.

        Example: of replicas with 3, 1 and 1 requests outstanding it is the second; if that takes 1 at once, the third.
        """
        return min(
            self.up,
            key=lambda replica: (replica.outstanding >= replica.in_flight.limit, replica.outstanding),
            default=None,
        )

    @contextmanager
    def out(self, replica: Replica) -> Iterator[None]:
        """Count a request as outstanding for the length of the context."""
        replica.outstanding += 1
        try:
            yield
        finally:
            replica.outstanding -= 1
