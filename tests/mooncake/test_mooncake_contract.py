"""The plane on Mooncake keeps the contract of every data plane, and what Mooncake alone would break."""

import subprocess
import sys
from collections import Counter
from functools import partial
from typing import Any

import anyio
import psutil
import pytest
import ray
import torch
from anyio.from_thread import BlockingPortal

from asyncrl.engine.data_plane.base import Consumption, Partition
from asyncrl.engine.data_plane.mooncake import library_folder, load
from asyncrl.engine.data_plane.tq import TransferQueuePlane
from asyncrl.engine.errors import DataPlaneDown, DataPlaneError, MissingRows, StoreFull
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.keys import sample_keys
from asyncrl.engine.testing.conformance.plane_actors import ClaimerActor
from asyncrl.engine.testing.conformance.plane_contract import CONTRACT, ContractTest, contract_partition

GROUPS = 600


def masters() -> set[int]:
    return {
        process.pid
        for process in psutil.process_iter()
        if process.name() == "mooncake_master" and process.status() != psutil.STATUS_ZOMBIE
    }


@pytest.mark.parametrize("sentence", CONTRACT, ids=lambda sentence: sentence.__name__)
def test_mooncake_keeps_the_contract(portal: BlockingPortal, plane: TransferQueuePlane, sentence: ContractTest) -> None:
    portal.call(sentence, plane)


def group(number: int, **columns: Any) -> tuple[GroupMeta, dict[str, Any]]:
    keys = sample_keys(0, number, 2)
    return GroupMeta(keys, {"group": number, "version": 0}), columns


def test_samples_without_tokens_and_columns_of_one_come_back_as_they_were(
    portal: BlockingPortal, plane: TransferQueuePlane
) -> None:
    """Mooncake takes no empty object, and TransferQueue gives it (N,) as (N, 1)."""
    portal.call(plane.register, Partition("shapes", 2, ("tokens", "one", "many"), ("trainer",)))
    none, one, many = torch.empty(0, dtype=torch.int32), torch.tensor([[2.0]]), torch.ones(3, 1, dtype=torch.bfloat16)
    meta, columns = group(0, tokens=[none, none], one=[one, one[0]], many=[many, many[:0]])
    portal.call(plane.put, "shapes", meta, columns)
    found = portal.call(plane.read, "shapes", meta.keys, tuple(columns))
    for name, values in columns.items():
        for value, read in zip(values, found[name], strict=True):
            assert (read.dtype, read.shape) == (value.dtype, value.shape)
            assert torch.equal(read, value)


def test_a_full_store_refuses_at_once_and_keeps_nothing_of_what_it_refused(
    portal: BlockingPortal, plane: TransferQueuePlane
) -> None:
    portal.call(plane.register, Partition("full", 2, ("tokens",), ("trainer",)))

    async def main() -> None:
        block = torch.ones(20 << 20, dtype=torch.uint8)
        put = []

        async def fill() -> None:
            for number in range(20):
                meta, columns = group(number, tokens=[block, block])
                await plane.put("full", meta, columns)
                put.append(meta)

        with anyio.fail_after(30), pytest.raises(StoreFull, match="mooncake_segment_gib"):
            await fill()
        assert len(put) >= 3
        assert await plane.consumption("full", "trainer") == Consumption(ready=len(put), claimed=0)
        for number in (0, len(put) - 1):
            assert torch.equal((await plane.read("full", put[number].keys, ("tokens",)))["tokens"][1], block)
        await plane.clear("full", put[0].keys)
        meta, columns = group(100, tokens=[block, block])
        await plane.put("full", meta, columns)
        with pytest.raises(MissingRows):
            await plane.read("full", put[0].keys, ("tokens",))
        await plane.clear("full", [key for left in (*put[1:], meta) for key in left.keys])
        assert await plane.keys("full") == []

    portal.call(main)


def test_bytes_of_a_row_that_goes_while_it_is_read_are_not_returned(
    portal: BlockingPortal, plane: TransferQueuePlane
) -> None:
    """Its memory may be another row's by the time that its bytes are read."""
    store: Any = plane._payloads._store  # type: ignore[attr-defined]
    store.write("torn", [torch.zeros(1000, dtype=torch.uint8)])
    client = store._store

    class RemovedMeanwhile:
        def __getattr__(self, name: str) -> Any:
            return getattr(client, name)

        def batch_get_into(self, *arguments: Any) -> Any:
            codes = client.batch_get_into(*arguments)
            client.batch_remove(["torn"], True)
            return codes

    store._store = RemovedMeanwhile()
    try:
        with pytest.raises(MissingRows, match="while it was read"):
            store.read(["torn"])
    finally:
        store._store = client


def test_a_second_owner_on_this_host_touches_neither_master(portal: BlockingPortal, plane: TransferQueuePlane) -> None:
    from asyncrl.engine.data_plane.mooncake_service import MooncakeMaster

    before = masters()
    assert before
    other = MooncakeMaster("127.0.0.1", 20)
    assert len(masters()) == len(before) + 1
    for connection in psutil.Process(other._process.pid).net_connections("tcp"):
        assert connection.laddr.ip == "127.0.0.1"
    other.close()
    assert masters() == before
    with pytest.raises(DataPlaneError, match="ended with"):
        portal.call(other.ping)


@pytest.mark.timeout(240)
def test_three_claimers_on_mooncake_lose_nothing_though_one_dies(
    portal: BlockingPortal, plane: TransferQueuePlane
) -> None:
    """A process that dies takes no row with it."""
    portal.call(plane.register, contract_partition("stress"))

    async def get(call: Any) -> None:
        await call()

    async def main() -> None:
        actors = [ray.remote(ClaimerActor).options(num_cpus=0).remote() for _ in range(3)]
        async with anyio.create_task_group() as tasks:
            for actor in actors:
                tasks.start_soon(get, partial(actor.connect.remote, deadline_s=60))
        async with anyio.create_task_group() as tasks:
            for first, actor in enumerate(actors):
                tasks.start_soon(get, partial(actor.put.remote, "stress", range(first, GROUPS, 3)))
        victim, *others = actors
        grabbing = victim.grab.remote("stress", "victim", 8)
        work = [actor.settle_until.remote("stress", f"owner{n}", GROUPS, 16) for n, actor in enumerate(others)]
        await anyio.sleep(1)
        ray.kill(victim, no_restart=True)
        with pytest.raises(ray.exceptions.RayActorError):
            await grabbing
        await plane.reap("stress", ["victim"])
        reports = [await report for report in work]
        settled = Counter(number for report in reports for number in report["settled"])
        assert settled == Counter(range(GROUPS))
        assert await plane.keys("stress") == []
        for actor in others:
            ray.kill(actor)

    portal.call(main)


def test_missing_libraries_are_named_with_the_command_that_brings_them() -> None:
    load()
    program = (
        "import asyncrl.engine.data_plane.mooncake as m, pathlib\n"
        "m.library_folder = lambda: pathlib.Path('/nowhere')\n"
        "m._LIBRARIES = ('libasyncrl-has-none.so.9',)\n"
        "print(m.fault_of_installation())"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "libasyncrl-has-none.so.9" in said
    assert "apt-get install libibverbs1 libnl-3-200 libnl-route-3-200" in said
    assert library_folder().is_relative_to(sys.prefix)


def test_a_storage_process_that_dies_is_noticed_and_the_end_leaves_no_master(
    portal: BlockingPortal, plane: TransferQueuePlane
) -> None:
    """The last test of this file, since it ends the plane."""
    service: Any = plane._service
    ray.kill(service._units[0])
    with pytest.raises(DataPlaneDown):
        portal.call(plane.watch)
    portal.call(plane.close)
    assert service._master._process.pid not in masters()
