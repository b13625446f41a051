"""Fetch policies: who reads, what is handed round, and one writer whoever reads."""

from collections.abc import Sequence
from typing import Any

import anyio
import pytest
import torch

from asyncrl.configs import load, parse_set
from asyncrl.engine.aio.virtual_time import run_virtual
from asyncrl.engine.data_plane.base import Partition
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.errors import ConfigError, DataPlaneError, MissingRows
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.group import GROUP, VERSION
from asyncrl.engine.records.keys import sample_keys
from asyncrl.trainers.fetch import Policy, Values, fetch_for
from asyncrl.trainers.siblings import OnlyChild

KEYS = sample_keys(0, 0, 3)
COLUMNS: dict[str, list[Any]] = {
    "tokens": [torch.arange(n, dtype=torch.int32) for n in (3, 0, 5)],
    "half": [torch.full((2, n), -0.5, dtype=torch.bfloat16) for n in (1, 2, 0)],
    "flag": [torch.tensor(i == 1) for i in range(3)],
}


class Post:
    """Hands what the leader sends to the followers of one process, in order."""

    def __init__(self, count: int) -> None:
        self.boxes = [anyio.create_memory_object_stream[torch.Tensor](100) for _ in range(count)]


class InProcessSiblings:
    def __init__(self, post: Post, index: int) -> None:
        self.index, self.count = index, len(post.boxes)
        self._post = post

    async def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        if self.index == 0:
            for box, _ in self._post.boxes[1:]:
                box.send_nowait(values.clone())
            return values
        sent = await self._post.boxes[self.index][1].receive()
        assert (sent.shape, sent.dtype) == (values.shape, values.dtype)
        return values.copy_(sent)


class Counting(LocalPlane):
    """Counts reads."""

    reads = 0

    async def read(self, partition: str, keys: Sequence[str], columns: Sequence[str]) -> dict[str, list[Any]]:
        self.reads += 1
        return await super().read(partition, keys, columns)


def read_by_all(policy: Policy, count: int, *, keys: Sequence[str] = KEYS) -> tuple[int, list[Values | Exception]]:
    """Have `count` siblings read; return how often the plane was asked, and what each got."""

    async def main() -> tuple[int, list[Values | Exception]]:
        plane, post = Counting(), Post(count)
        await plane.register(Partition("train", 3, tuple(COLUMNS), ("trainer",)))
        await plane.put("train", GroupMeta(KEYS, {VERSION: 0, GROUP: 0}), COLUMNS)
        got: dict[int, Values | Exception] = {}

        async def one(index: int) -> None:
            siblings = InProcessSiblings(post, index) if count > 1 else OnlyChild()
            try:
                fetch = fetch_for(policy, plane, "train", siblings=siblings)
                got[index] = await fetch.read(keys, ["tokens", "half", "flag"])
            except DataPlaneError as error:
                got[index] = error

        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                for index in range(count):
                    tasks.start_soon(one, index)
        return plane.reads, [got[index] for index in range(count)]

    return run_virtual(main)


@pytest.mark.parametrize(
    ("policy", "count", "reads"),
    [("independent", 3, 3), ("leader", 3, 1), ("auto", 3, 1), ("leader", 1, 1), ("auto", 1, 1)],
)
def test_every_sibling_has_the_rows_and_the_leader_alone_reads_them(policy: Policy, count: int, reads: int) -> None:
    """Values, shapes and dtypes bit by bit: ragged, empty, scalar, bfloat16."""
    asked, got = read_by_all(policy, count)
    assert asked == reads
    for values in got:
        assert isinstance(values, dict)
        assert list(values) == ["tokens", "half", "flag"]
        for name, column in values.items():
            for value, expected in zip(column, COLUMNS[name], strict=True):
                assert (value.dtype, value.shape) == (expected.dtype, expected.shape)
                assert torch.equal(value, expected)


def test_a_read_that_fails_fails_on_every_sibling() -> None:
    """Nobody waits for tensors that do not come."""
    _, (leader, *others) = read_by_all("leader", 3, keys=["v9_p9_g9"])
    assert isinstance(leader, MissingRows)
    for error in others:
        assert isinstance(error, DataPlaneError)
        assert "the leader of the siblings could not read 1 keys: MissingRows" in str(error)
        assert "v9_p9_g9" in str(error)


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.fetch_policy.*'all'; it must be one of independent, leader, auto"):
        load("default", [parse_set("trainer.fetch_policy=all")])
