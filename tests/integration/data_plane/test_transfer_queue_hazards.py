"""What TransferQueue does when it is slow, hung, full or half-way: each hazard has its test."""

import hashlib
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from anyio.from_thread import BlockingPortal
from tensordict import TensorDict

from asyncrl.engine.data_plane.base import Lease
from asyncrl.engine.data_plane.codec import encode_row, row_parts
from asyncrl.engine.data_plane.payloads import PAYLOAD
from asyncrl.engine.data_plane.rows import column_row_tags, group_row_tags
from asyncrl.engine.data_plane.tq import TransferQueuePlane
from asyncrl.engine.errors import DataPlaneError, MissingRows, Overdue, StoreFull
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.testing.conformance.plane_contract import (
    TOKENS,
    TRAINER,
    claim_groups,
    contract_columns,
    contract_group,
    contract_partition,
    put_groups,
    read_one,
    rows_of,
)
from asyncrl.engine.testing.conformance.queue_in_process import queue_in_process


@pytest.fixture
def plane(portal: BlockingPortal) -> Iterator[TransferQueuePlane]:
    """A TransferQueue of the test's own, because the test hurts it."""
    plane = queue_in_process(deadline_s=10)
    portal.call(plane.register, contract_partition("p"))
    yield plane
    portal.call(plane.close)


class SlowStorage:
    """A storage manager whose clears take `clear_s`, or raise `error` once."""

    def __init__(self, storage: Any, *, clear_s: float = 0.0, error: Exception | None = None) -> None:
        self._storage = storage
        self._clear_s = clear_s
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    async def clear_data(self, metadata: Any) -> None:
        await anyio.sleep(self._clear_s)
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        await self._storage.clear_data(metadata)


class BusyForALittle:
    """Unpickled by TransferQueue's controller, it keeps its one thread busy."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __reduce__(self) -> tuple[Any, ...]:
        return time.sleep, (self._seconds,)


async def raw_rows(plane: TransferQueuePlane, partition: str) -> set[str]:
    """List the rows that TransferQueue itself knows, ghosts included."""
    listed = await plane._client.async_kv_list(partition)
    return set(listed.get(partition, {}))


def test_a_row_seen_before_its_tags_is_passed_over(portal: BlockingPortal, plane: TransferQueuePlane) -> None:
    group, other = contract_group(0), contract_group(1)

    async def main() -> None:
        client = plane._client
        meta = await client.async_kv_retrieve_meta([group.row], "p", create=True)
        payload = encode_row(group.row, group.keys, contract_columns(group))
        nested = torch.nested.as_nested_tensor([payload], layout=torch.jagged)
        await client.storage_manager.put_data(TensorDict({PAYLOAD: nested}, batch_size=1), meta)
        await put_groups(plane, "p", [other])
        assert rows_of(await claim_groups(plane, "p")) == [other.row]
        # Another row's tags that come late to the slot are not this row's.
        for tags in (
            group_row_tags(other.keys, (TOKENS,), other.tags),
            group_row_tags(group.keys, (TOKENS,), group.tags),
        ):
            assert await plane.keys("p") == list(other.keys)
            assert (await claim_groups(plane, "p")).groups == ()
            meta.update_custom_meta([tags])
            await client.async_set_custom_meta(meta)
        assert rows_of(await claim_groups(plane, "p")) == [group.row]

    portal.call(main)


def test_what_the_book_did_not_expect_is_an_error_with_the_operations_name(
    portal: BlockingPortal, plane: TransferQueuePlane
) -> None:
    """FOUND-I12: an error inside TransferQueue's controller came back as a KeyError without a name."""
    with pytest.raises(DataPlaneError, match=r"leased failed in the store: TypeError.*fences"):
        portal.call(plane._control, "leased", "p", {"partition": "p", "consumer": TRAINER})


def test_a_partition_that_another_version_registered_is_named(portal: BlockingPortal) -> None:
    """FOUND-I12: a partition's shape is read as whoever registered it wrote it."""
    plane = queue_in_process()

    async def main() -> None:
        await plane.register(contract_partition("p"))
        odd = {"name": "old", "columns": [TOKENS], "consumers": [TRAINER]}
        await plane._client.async_kv_retrieve_meta(["seed"], "old", create=True)
        await plane._control("register", "old", {"partition": "old", "spec": odd})
        with pytest.raises(DataPlaneError, match=r"another version of asyncrl registered partition 'old'"):
            await plane.partition("old")

    portal.call(main)
    portal.call(plane.close)


def test_every_call_has_a_deadline_when_the_controller_hangs(portal: BlockingPortal, plane: TransferQueuePlane) -> None:
    group, late = contract_group(0), contract_group(1)
    hurried = TransferQueuePlane(plane._client, payloads=plane._payloads, deadline_s=0.3, closer=lambda: None)
    lease = Lease("p", TRAINER, {})
    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "register": lambda: hurried.register(contract_partition("other")),
        "put": lambda: hurried.put("p", late, contract_columns(late)),
        "claim": lambda: claim_groups(hurried, "p", 1, claim_id="lost"),
        "give_back": lambda: hurried.give_back(lease),
        "renew": lambda: hurried.renew(lease),
        "leased": lambda: hurried.leased(lease),
        "reap": lambda: hurried.reap("p", ["nobody"]),
        "read": lambda: hurried.read("p", group.keys, (TOKENS,)),
        "write": lambda: hurried.write("p", "adv", dict.fromkeys(group.keys, 1), writer="w"),
        "clear": lambda: hurried.clear("p", ["v9_p9_g9"]),
        "consumption": lambda: hurried.consumption("p", TRAINER),
        "keys": lambda: hurried.keys("p"),
        "groups": lambda: hurried.groups("p"),
    }
    seconds: dict[str, float] = {}

    async def overdue(name: str, call: Callable[[], Awaitable[Any]]) -> None:
        start = time.perf_counter()
        with pytest.raises(Overdue, match=r"within 0.3 s"):
            await call()
        seconds[name] = time.perf_counter() - start

    async def main() -> None:
        await put_groups(plane, "p", [group])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(plane._control, "keys", "p", {"partition": "p", "busy": BusyForALittle(2.5)})
            await anyio.sleep(0.2)
            async with anyio.create_task_group() as calling:
                for name, call in calls.items():
                    calling.start_soon(overdue, name, call)
            tasks.cancel_scope.cancel()
        # A put also waits, for some seconds at most, to take its remains away.
        assert {name for name, taken in seconds.items() if taken > 1.5} <= {"put"}
        assert seconds["put"] < 6
        # The claim whose answer was lost is still there to be asked for, and nothing else came of it.
        assert rows_of(await claim_groups(plane, "p", 1, claim_id="lost")) == [group.row]
        assert await raw_rows(plane, "p") == {group.row}

    portal.call(main)


def test_a_closed_plane_refuses_and_closes_again_quietly(portal: BlockingPortal) -> None:
    plane = queue_in_process()
    portal.call(plane.close)
    portal.call(plane.close)
    with pytest.raises(DataPlaneError, match="closed"):
        portal.call(plane.keys, "p")


@pytest.mark.parametrize("shared", [False, True], ids=["storage", "shared memory"])
def test_a_failed_or_cancelled_put_leaves_no_ghost_in_transfer_queue(
    portal: BlockingPortal, shared: bool, tmp_path: Path
) -> None:
    plane = queue_in_process(capacity_rows=5, shared_memory=tmp_path if shared else None)

    async def main() -> None:
        await plane.register(contract_partition("p"))
        whole = set()
        for number in range(12):
            group = contract_group(number)
            with anyio.move_on_after(number * 0.0006):
                try:
                    await put_groups(plane, "p", [group])
                except StoreFull:
                    continue
                whole.add(group.row)
            assert await raw_rows(plane, "p") == whole
            assert len(list(tmp_path.glob("*/*"))) == shared * (len(whole) + len(["lock"]))
        odd = contract_group(99)
        with pytest.raises(TypeError):
            await plane.put("p", odd, {TOKENS: [torch.zeros(1), torch.zeros(1, dtype=torch.int8)]})
        # Rows that came and went did not use up the store.
        for number in range(100, 100 + 5 - len(whole)):
            await put_groups(plane, "p", [contract_group(number)])
        with pytest.raises(StoreFull):
            await put_groups(plane, "p", [contract_group(200)])

    portal.call(main)
    portal.call(plane.close)


def test_rows_of_other_dtypes_do_not_disturb_each_other(portal: BlockingPortal, plane: TransferQueuePlane) -> None:
    """TransferQueue holds one dtype a field and converts silently; one byte buffer a row has none to convert."""

    async def main() -> None:
        dtypes = (torch.int64, torch.float32, torch.bfloat16)
        groups = [contract_group(n) for n in range(3)]
        for group, dtype in zip(groups, dtypes, strict=True):
            await plane.put("p", group, {TOKENS: [torch.ones(2, dtype=dtype)] * 2})
        keys = [key for group in groups for key in group.keys]
        values = (await plane.read("p", keys, (TOKENS,)))[TOKENS]
        assert [value.dtype for value in values[::2]] == list(dtypes)

    portal.call(main)


def test_what_is_put_during_a_slow_clear_is_complete_and_the_dying_row_is_not_handed_out(
    portal: BlockingPortal, plane: TransferQueuePlane
) -> None:
    """E1: the storage half of a clear comes 200 ms late; a new group comes and is claimed meanwhile."""
    old, new = contract_group(0), contract_group(1)
    storage = plane._client.storage_manager
    plane._client.storage_manager = SlowStorage(storage, clear_s=0.2)

    async def main() -> None:
        await put_groups(plane, "p", [old])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(plane.clear, "p", old.keys)
            await anyio.sleep(0.05)
            await put_groups(plane, "p", [new])
            assert rows_of(await claim_groups(plane, "p")) == [new.row]
            with pytest.raises(MissingRows):
                await read_one(plane, "p", old)
        assert [v[0].item() for v in await read_one(plane, "p", new)] == [1, 1]
        assert await raw_rows(plane, "p") == {new.row}

    portal.call(main)
    plane._client.storage_manager = storage


def test_a_second_clear_of_a_group_does_not_take_the_row_that_has_its_place_by_then(
    portal: BlockingPortal, plane: TransferQueuePlane
) -> None:
    """TransferQueue deletes by place, and uses a place again as soon as it is free."""
    old, new = contract_group(0), contract_group(1)
    storage = plane._client.storage_manager
    plane._client.storage_manager = SlowStorage(storage, clear_s=0.4)

    async def main() -> None:
        await put_groups(plane, "p", [old])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(plane.clear, "p", old.keys)
            await anyio.sleep(0.2)
            tasks.start_soon(plane.clear, "p", old.keys)
            while old.row in await raw_rows(plane, "p"):
                await anyio.sleep(0.01)
            await put_groups(plane, "p", [new])
        assert [v[0].item() for v in await read_one(plane, "p", new)] == [1, 1]

    portal.call(main)
    plane._client.storage_manager = storage


@pytest.mark.parametrize("shared", [False, True], ids=["storage", "shared memory"])
def test_what_a_dead_process_left_half_done_is_mended(portal: BlockingPortal, shared: bool, tmp_path: Path) -> None:
    """A column that it wrote after the clear goes with the next clear; its late deletion spares a new row."""
    plane = queue_in_process(shared_memory=tmp_path if shared else None)
    group, other = contract_group(0), contract_group(1)

    async def main() -> None:
        await plane.register(contract_partition("p"))
        await put_groups(plane, "p", [group])
        standing = await plane._control("standing", "p", {"partition": "p", "keys": list(group.keys)})
        await plane.clear("p", group.keys)
        tags = column_row_tags(group.row, standing[group.row], "adv", "rank0", group.keys)
        await plane._put_row("write", "p", row_parts(tags["row"], group.keys, {"adv": [1, 2]}), tags)
        await put_groups(plane, "p", [group, other])
        with pytest.raises(MissingRows, match="adv"):
            await plane.read("p", group.keys, ("adv",))
        await plane._payloads.delete("p", standing)
        assert len(await read_one(plane, "p", group)) == 2
        await plane.clear("p", other.keys)
        assert await raw_rows(plane, "p") == {group.row}

    try:
        portal.call(main)
    finally:
        portal.call(plane.close)


def test_a_clear_that_fails_half_way_leaves_nothing_ready_and_can_be_repeated(
    portal: BlockingPortal, plane: TransferQueuePlane
) -> None:
    """E2: the store's error reaches the caller; the group is neither listed nor claimed again."""
    group, other = contract_group(0), contract_group(1)
    storage = plane._client.storage_manager
    plane._client.storage_manager = SlowStorage(storage, error=RuntimeError("storage is away"))

    async def main() -> None:
        await put_groups(plane, "p", [group, other])
        claim = await claim_groups(plane, "p", 1)
        with pytest.raises(DataPlaneError, match="storage is away"):
            await plane.clear("p", group.keys, lease=claim.lease)
        await plane.give_back(claim.lease)
        assert await plane.keys("p") == list(other.keys)
        assert rows_of(await claim_groups(plane, "p")) == [other.row]
        await plane.clear("p", (*group.keys, *other.keys))
        assert await plane.keys("p") == []

    portal.call(main)
    plane._client.storage_manager = storage


@pytest.mark.long
@pytest.mark.timeout(90)
def test_thousands_of_puts_and_clears_at_once_never_mix_up_a_payload(
    portal: BlockingPortal, plane: TransferQueuePlane
) -> None:
    """E1: every read during a storm of puts and clears gives the hash of its own key."""
    pairs, lanes = 1000, 8

    def columns(group: GroupMeta) -> dict[str, list[torch.Tensor]]:
        hashes = [hashlib.sha256(key.encode()).digest() for key in group.keys]
        return {TOKENS: [torch.tensor(list(digest * (1 + digest[0] % 3)), dtype=torch.uint8) for digest in hashes]}

    async def lane(first: int) -> None:
        for number in range(first, pairs, lanes):
            group = contract_group(number)
            await plane.put("p", group, columns(group))
            got = await read_one(plane, "p", group)
            assert [v.tolist() for v in got] == [v.tolist() for v in columns(group)[TOKENS]]
            await plane.clear("p", group.keys)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for first in range(lanes):
                tasks.start_soon(lane, first)
        assert await raw_rows(plane, "p") == set()

    portal.call(partial(main))
