"""Counts what passes through a plane: calls, keys, bytes, seconds and errors by operation.

Off costs nothing: an unobserved plane is not wrapped. Rows of other writers are counted with the claims that
passed them over, and warned of once each.
"""

import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial as bind
from typing import Any, TypeVar

import structlog
import torch

from asyncrl.engine.data_plane.base import Claim, Column, DataPlane, Lease
from asyncrl.engine.data_plane.passing import PassingPlane
from asyncrl.engine.records import GroupMeta

log = structlog.get_logger()

Result = TypeVar("Result")


@dataclass(slots=True)
class OperationStats:
    """Totals of one operation. `bytes` counts tensor payload, `status` ok, error and timeout."""

    calls: int = 0
    keys: int = 0
    bytes: int = 0
    seconds: float = 0.0
    status: dict[str, int] = field(default_factory=lambda: {"ok": 0, "error": 0, "timeout": 0})
    passed_over: int = 0
    """Rows of other writers that a claim saw, each counted once."""


def payload_bytes(columns: Mapping[str, Sequence[Any]]) -> int:
    return sum(value.nbytes for values in columns.values() for value in values if isinstance(value, torch.Tensor))


class ObservedPlane(PassingPlane):
    """A DataPlane that counts; `snapshot()` gives the totals."""

    def __init__(self, plane: DataPlane, *, clock: Callable[[], float]) -> None:
        super().__init__(plane)
        self._clock = clock
        self._stats: dict[str, OperationStats] = {}
        self._passed_over: set[tuple[str, str]] = set()

    def snapshot(self) -> dict[str, OperationStats]:
        """Return a copy of the totals so far, by operation."""
        return copy.deepcopy(self._stats)

    async def _pass(self, operation: str, partition: str, call: Callable[[], Awaitable[Result]]) -> Result:
        return await self._observe(operation, partition, call)

    async def _observe(
        self,
        operation: str,
        partition: str,
        call: Callable[[], Awaitable[Result]],
        *,
        keys: int = 0,
        size: Callable[[Result], tuple[int, int]] | None = None,
    ) -> Result:
        """Count a call of so many keys; `size` gives keys and bytes from the result, where the call decides them."""
        start = self._clock()
        status, result_keys, result_bytes = "error", keys, 0
        try:
            result = await call()
            status = "ok"
            if size is not None:
                result_keys, result_bytes = size(result)
            return result
        except TimeoutError:
            status = "timeout"
            raise
        finally:
            stats = self._stats.setdefault(operation, OperationStats())
            stats.calls += 1
            stats.keys += result_keys
            stats.bytes += result_bytes
            stats.seconds += self._clock() - start
            stats.status[status] += 1

    async def put(self, partition: str, group: GroupMeta, columns: Mapping[str, Column]) -> GroupMeta:
        call, size = bind(self._plane.put, partition, group, columns), (group.size, payload_bytes(columns))
        return await self._observe("put", partition, call, keys=group.size, size=lambda _: size)

    async def claim(self, partition: str, consumer: str, **asked: Any) -> Claim:
        call = bind(self._plane.claim, partition, consumer, **asked)
        claim = await self._observe("claim", partition, call, size=lambda c: (sum(g.size for g in c.groups), 0))
        for row, why in claim.passed_over.items():
            if (partition, row) not in self._passed_over:
                self._passed_over.add((partition, row))
                self._stats["claim"].passed_over += 1
                log.warning("a row of another writer is passed over", partition=partition, row=row, why=why)
        return claim

    async def read(self, partition: str, keys: Sequence[str], columns: Sequence[str]) -> dict[str, list[Any]]:
        call, n = bind(self._plane.read, partition, keys, columns), len(keys)
        return await self._observe("read", partition, call, keys=n, size=lambda values: (n, payload_bytes(values)))

    async def write(self, partition: str, column: str, values: Mapping[str, Any], *, writer: str) -> None:
        call = bind(self._plane.write, partition, column, values, writer=writer)
        size = (len(values), payload_bytes({column: list(values.values())}))
        await self._observe("write", partition, call, keys=len(values), size=lambda _: size)

    async def clear(self, partition: str, keys: Sequence[str], *, lease: Lease | None = None) -> None:
        await self._observe("clear", partition, bind(self._plane.clear, partition, keys, lease=lease), keys=len(keys))

    async def keys(self, partition: str) -> list[str]:
        call = bind(self._plane.keys, partition)
        return await self._observe("keys", partition, call, size=lambda keys: (len(keys), 0))

    async def watch(self) -> None:
        # Not a call that ends: it lasts as long as the run.
        await self._plane.watch()
