"""Counts what passes through a plane: calls, keys, bytes, seconds and errors by operation.

Off costs nothing: an unobserved plane is not wrapped. Rows of other writers are counted with the claims that
passed them over, and warned of once each.
"""

import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog
import torch

from asyncrl.engine.data_plane.base import Claim, Column, Consumption, DataPlane, Lease, Partition
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


@dataclass(frozen=True, slots=True)
class Observation:
    """One call, as given to the callback."""

    operation: str
    partition: str
    keys: int
    bytes: int
    seconds: float
    status: str


def payload_bytes(columns: Mapping[str, Sequence[Any]]) -> int:
    return sum(value.nbytes for values in columns.values() for value in values if isinstance(value, torch.Tensor))


class ObservedPlane:
    """A DataPlane that counts; `callback` sees every call, `snapshot()` the totals."""

    def __init__(
        self,
        plane: DataPlane,
        *,
        clock: Callable[[], float],
        callback: Callable[[Observation], None] | None = None,
    ) -> None:
        self._plane = plane
        self._clock = clock
        self._callback = callback
        self._stats: dict[str, OperationStats] = {}
        self._passed_over: set[tuple[str, str]] = set()

    def snapshot(self) -> dict[str, OperationStats]:
        """Return a copy of the totals so far, by operation."""
        return copy.deepcopy(self._stats)

    async def _observe(
        self,
        operation: str,
        partition: str,
        keys: int,
        call: Awaitable[Result],
        size: Callable[[Result], tuple[int, int]] | None = None,
    ) -> Result:
        """Await `call`; `size` gives keys and bytes from the result, where the call decides them."""
        start = self._clock()
        status, result_keys, result_bytes = "error", keys, 0
        try:
            result = await call
            status = "ok"
            if size is not None:
                result_keys, result_bytes = size(result)
            return result
        except TimeoutError:
            status = "timeout"
            raise
        finally:
            seconds = self._clock() - start
            stats = self._stats.setdefault(operation, OperationStats())
            stats.calls += 1
            stats.keys += result_keys
            stats.bytes += result_bytes
            stats.seconds += seconds
            stats.status[status] += 1
            if self._callback is not None:
                self._callback(Observation(operation, partition, result_keys, result_bytes, seconds, status))

    async def register(self, partition: Partition) -> None:
        await self._observe("register", partition.name, 0, self._plane.register(partition))

    async def partition(self, name: str) -> Partition:
        return await self._observe("partition", name, 0, self._plane.partition(name))

    async def put(self, partition: str, group: GroupMeta, columns: Mapping[str, Column]) -> None:
        size = (group.size, payload_bytes(columns))
        await self._observe("put", partition, group.size, self._plane.put(partition, group, columns), lambda _: size)

    async def claim(
        self,
        partition: str,
        consumer: str,
        *,
        columns: Sequence[str],
        max_groups: int,
        owner: str,
        claim_id: str,
    ) -> Claim:
        call = self._plane.claim(
            partition, consumer, columns=columns, max_groups=max_groups, owner=owner, claim_id=claim_id
        )
        claim = await self._observe(
            "claim", partition, 0, call, lambda claim: (sum(group.size for group in claim.groups), 0)
        )
        for row, why in claim.passed_over.items():
            if (partition, row) not in self._passed_over:
                self._passed_over.add((partition, row))
                self._stats["claim"].passed_over += 1
                log.warning("a row of another writer is passed over", partition=partition, row=row, why=why)
        return claim

    async def give_back(self, lease: Lease) -> None:
        await self._observe("give_back", lease.partition, 0, self._plane.give_back(lease))

    async def renew(self, lease: Lease) -> None:
        await self._observe("renew", lease.partition, 0, self._plane.renew(lease))

    async def leased(self, lease: Lease) -> frozenset[str]:
        return await self._observe("leased", lease.partition, 0, self._plane.leased(lease))

    async def reap(self, partition: str, owners: Sequence[str]) -> list[str]:
        return await self._observe("reap", partition, 0, self._plane.reap(partition, owners))

    async def read(self, partition: str, keys: Sequence[str], columns: Sequence[str]) -> dict[str, list[Any]]:
        return await self._observe(
            "read",
            partition,
            len(keys),
            self._plane.read(partition, keys, columns),
            lambda values: (len(keys), payload_bytes(values)),
        )

    async def write(self, partition: str, column: str, values: Mapping[str, Any], *, writer: str) -> None:
        size = (len(values), payload_bytes({column: list(values.values())}))
        call = self._plane.write(partition, column, values, writer=writer)
        await self._observe("write", partition, len(values), call, lambda _: size)

    async def clear(self, partition: str, keys: Sequence[str], *, lease: Lease | None = None) -> None:
        await self._observe("clear", partition, len(keys), self._plane.clear(partition, keys, lease=lease))

    async def consumption(self, partition: str, consumer: str) -> Consumption:
        return await self._observe("consumption", partition, 0, self._plane.consumption(partition, consumer))

    async def groups(self, partition: str) -> list[GroupMeta]:
        return await self._observe("groups", partition, 0, self._plane.groups(partition))

    async def keys(self, partition: str) -> list[str]:
        return await self._observe("keys", partition, 0, self._plane.keys(partition), lambda keys: (len(keys), 0))

    async def watch(self) -> None:
        await self._plane.watch()

    async def close(self) -> None:
        await self._observe("close", "", 0, self._plane.close())
