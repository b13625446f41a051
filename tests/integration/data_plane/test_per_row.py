"""On several nodes each row goes to shared memory or to TransferQueue's storage, and comes back from anywhere."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from anyio.from_thread import BlockingPortal

from asyncrl.engine.data_plane.per_row import PerRow
from asyncrl.engine.data_plane.shared_memory import SharedMemory
from asyncrl.engine.data_plane.shelves import Shelves
from asyncrl.engine.data_plane.tq import TransferQueuePlane
from asyncrl.engine.errors import MissingRows, StoreFull
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.group import STORED_AT
from asyncrl.engine.testing.conformance.plane_contract import (
    CONTRACT,
    ContractTest,
    claim_groups,
    contract_columns,
    contract_group,
    contract_partition,
)
from asyncrl.engine.testing.conformance.queue_in_process import queue_in_process

STORAGE = "127.0.0.1"
"""Where TransferQueue's storage is: a node of its own, without a shelf."""


class OneProcess(Shelves):
    """The shelves of all nodes, whose actors are this process."""

    async def read(self, node: str, puts: Sequence[str]) -> list[torch.Tensor]:
        return [SharedMemory(Path(self.paths[node])).map(put) for put in puts]

    async def remove(self, node: str, puts: Sequence[str]) -> None:
        SharedMemory(Path(self.paths[node])).remove(puts)


class Nodes:
    """Planes of processes on the nodes `one` and `two`, which have ranks, and `collects`, which has none."""

    def __init__(self, folder: Path) -> None:
        self.memory = {name: SharedMemory.create(_made(folder / name)) for name in ("one", "two")}
        self.paths = {name: str(memory.path) for name, memory in self.memory.items()}
        self.driver = queue_in_process(shared_memory=OneProcess(self.paths, "one"))
        self.planes = {"one": self.driver, **{name: self._plane(name) for name in ("two", "collects")}}

    def files(self, node: str) -> int:
        return len(os.listdir(self.paths[node])) - 1

    def _plane(self, name: str) -> TransferQueuePlane:
        client = self.driver._client
        payloads = PerRow(client, OneProcess(self.paths, name))
        return TransferQueuePlane(client, payloads=payloads, deadline_s=10, closer=lambda: None)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.fixture
def nodes(portal: BlockingPortal, tmp_path: Path) -> Iterator[Nodes]:
    nodes = portal.call(Nodes, tmp_path)
    yield nodes
    portal.call(nodes.driver.close)
    for memory in nodes.memory.values():
        memory.close()


async def put(nodes: Nodes, node: str, number: int) -> GroupMeta:
    for plane in nodes.planes.values():
        await plane.register(contract_partition("p"))
    group = contract_group(number)
    return await nodes.planes[node].put("p", group, contract_columns(group))


@pytest.mark.parametrize("sentence", CONTRACT, ids=lambda sentence: sentence.__name__)
@pytest.mark.parametrize("node", [pytest.param("one", marks=pytest.mark.long), "collects"])
def test_a_plane_on_a_node_of_several_keeps_the_contract(
    portal: BlockingPortal, tmp_path: Path, sentence: ContractTest, node: str
) -> None:
    memory = SharedMemory.create(tmp_path)
    plane = portal.call(lambda: queue_in_process(shared_memory=OneProcess({"one": str(memory.path)}, node)))
    try:
        portal.call(sentence, plane)
    finally:
        portal.call(plane.close)
        memory.close()


def test_a_row_is_read_from_where_it_was_put(portal: BlockingPortal, nodes: Nodes) -> None:
    async def main() -> None:
        groups = [await put(nodes, node, n) for n, node in enumerate(("one", "two", "collects"))]
        assert [group.tags[STORED_AT] for group in groups] == ["one", "two", STORAGE]
        assert (nodes.files("one"), nodes.files("two")) == (1, 1)
        keys = [key for group in groups for key in group.keys]
        expected = [value for group in groups for value in contract_columns(group)["tokens"]]
        for name, plane in nodes.planes.items():
            before = plane.traffic()
            found = await plane.read("p", keys, ("tokens",))
            assert all(torch.equal(one, two) for one, two in zip(found["tokens"], expected, strict=True))
            paths = {path: flow.bytes > 0 for path, flow in plane.traffic().minus(before).gets.items() if flow.bytes}
            far = {"memory_far": True, "store_far": True}
            assert paths == (far if name == "collects" else {"memory_near": True, **far})
        assert set(nodes.planes["one"].traffic().puts) == {"memory_near"}
        assert set(nodes.planes["collects"].traffic().puts) == {"store_far"}

    portal.call(main)


def test_what_is_claimed_and_listed_has_the_tags_that_its_put_returned(portal: BlockingPortal, nodes: Nodes) -> None:
    """Else the log would have other tags than were judged."""

    async def main() -> None:
        groups = [await put(nodes, node, n) for n, node in enumerate(("one", "two", "collects"))]
        assert list((await claim_groups(nodes.driver, "p")).groups) == groups
        assert await nodes.driver.groups("p") == groups

    portal.call(main)


def test_a_row_that_is_put_again_keeps_what_the_log_says_of_it(portal: BlockingPortal, nodes: Nodes) -> None:
    """The row of a checkpoint: the put that is logged has its tags as they were then."""

    async def main() -> None:
        await nodes.driver.register(contract_partition("p"))
        group = contract_group(0)
        old = GroupMeta(group.keys, {**group.tags, STORED_AT: "a node that is gone"})
        assert await nodes.driver.put("p", old, contract_columns(group)) == old
        assert await nodes.driver.groups("p") == [old]

    portal.call(main)


def test_rows_are_cleared_where_they_are_and_leave_nothing(portal: BlockingPortal, nodes: Nodes) -> None:
    async def main() -> None:
        groups = [await put(nodes, node, n) for n, node in enumerate(("one", "two", "collects"))]
        await nodes.driver.clear("p", [key for group in groups for key in group.keys])
        assert (nodes.files("one"), nodes.files("two")) == (0, 0)
        assert await nodes.driver.keys("p") == []
        with pytest.raises(MissingRows):
            await nodes.planes["two"].read("p", groups[1].keys, ("tokens",))

    portal.call(main)


def test_a_row_that_finds_no_shared_memory_goes_to_the_storage(
    portal: BlockingPortal, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise StoreFull("as asked")

    async def main() -> None:
        kept = await put(nodes, "one", 0)
        memory = nodes.driver._payloads._memory  # type: ignore[attr-defined]
        with monkeypatch.context() as patch:
            patch.setattr(memory, "write", full)
            sent = await put(nodes, "one", 1)
        again = await put(nodes, "one", 2)
        assert [group.tags[STORED_AT] for group in (kept, sent, again)] == ["one", STORAGE, "one"]
        assert nodes.files("one") == 2
        await nodes.planes["two"].read("p", [*kept.keys, *sent.keys], ("tokens",))

    portal.call(main)
