"""A plane before another one, for those that count, delay, force or watch what passes through."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial as bind
from typing import Any, TypeVar

from asyncrl.engine.data_plane.base import Claim, Column, Consumption, DataPlane, Lease, Partition
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.traffic import Traffic

Result = TypeVar("Result")


class PassingPlane:
    """Passes every operation on to `plane`. Override an operation, or `_pass`, by which all of them go."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    async def _pass(self, operation: str, partition: str, call: Callable[[], Awaitable[Result]]) -> Result:
        """Make one call to the plane behind."""
        return await call()

    async def register(self, partition: Partition) -> None:
        await self._pass("register", partition.name, bind(self._plane.register, partition))

    async def partition(self, name: str) -> Partition:
        return await self._pass("partition", name, bind(self._plane.partition, name))

    async def put(self, partition: str, group: GroupMeta, columns: Mapping[str, Column]) -> GroupMeta:
        return await self._pass("put", partition, bind(self._plane.put, partition, group, columns))

    async def claim(
        self, partition: str, consumer: str, *, columns: Sequence[str], max_groups: int, owner: str, claim_id: str
    ) -> Claim:
        asked: dict[str, Any] = {"columns": columns, "max_groups": max_groups, "owner": owner, "claim_id": claim_id}
        return await self._pass("claim", partition, bind(self._plane.claim, partition, consumer, **asked))

    async def give_back(self, lease: Lease) -> None:
        await self._pass("give_back", lease.partition, bind(self._plane.give_back, lease))

    async def renew(self, lease: Lease) -> None:
        await self._pass("renew", lease.partition, bind(self._plane.renew, lease))

    async def leased(self, lease: Lease) -> frozenset[str]:
        return await self._pass("leased", lease.partition, bind(self._plane.leased, lease))

    async def reap(self, partition: str, owners: Sequence[str]) -> list[str]:
        return await self._pass("reap", partition, bind(self._plane.reap, partition, owners))

    async def read(self, partition: str, keys: Sequence[str], columns: Sequence[str]) -> dict[str, list[Any]]:
        return await self._pass("read", partition, bind(self._plane.read, partition, keys, columns))

    async def write(self, partition: str, column: str, values: Mapping[str, Any], *, writer: str) -> None:
        await self._pass("write", partition, bind(self._plane.write, partition, column, values, writer=writer))

    async def clear(self, partition: str, keys: Sequence[str], *, lease: Lease | None = None) -> None:
        await self._pass("clear", partition, bind(self._plane.clear, partition, keys, lease=lease))

    async def consumption(self, partition: str, consumer: str) -> Consumption:
        return await self._pass("consumption", partition, bind(self._plane.consumption, partition, consumer))

    async def groups(self, partition: str) -> list[GroupMeta]:
        return await self._pass("groups", partition, bind(self._plane.groups, partition))

    async def keys(self, partition: str) -> list[str]:
        return await self._pass("keys", partition, bind(self._plane.keys, partition))

    def traffic(self) -> Traffic:
        return self._plane.traffic()

    async def watch(self) -> None:
        await self._pass("watch", "", self._plane.watch)

    async def close(self) -> None:
        await self._pass("close", "", self._plane.close)
