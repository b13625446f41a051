"""Which replica a request goes to: of those that are up, the one with the fewest requests outstanding.

Invariant: each request that goes out comes back once, to the same replica's count.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from asyncrl.collectors.engines.http.server import Server


@dataclass(eq=False, slots=True)
class Replica:
    """A server, how many requests are out at it, and how many probes it has missed in a row."""

    server: Server
    url: str
    up: bool = False
    outstanding: int = 0
    missed: int = 0


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
