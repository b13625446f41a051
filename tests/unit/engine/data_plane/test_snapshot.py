"""A partition survives as files, without pickle, under the same keys."""

from pathlib import Path

import pytest
import torch

from asyncrl.engine.aio.virtual_time import run_virtual
from asyncrl.engine.data_plane.base import Partition
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.data_plane.snapshot import Snapshot
from asyncrl.engine.errors import DataPlaneError
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.keys import sample_keys


async def _plane() -> LocalPlane:
    plane = LocalPlane()
    await plane.register(Partition("train", 2, ("tokens", "note"), ("trainer",), ("note",)))
    return plane


def test_a_restored_partition_has_the_same_groups_and_values_and_all_are_ready(tmp_path: Path) -> None:
    async def main() -> None:
        plane = await _plane()
        for number in range(3):
            group = GroupMeta(
                sample_keys(number, number, 2), {"group": number, "version": number, "reward": [0.5, float("nan")]}
            )
            tokens = [
                torch.tensor([number, -0.0, float("inf")], dtype=torch.bfloat16),
                torch.empty(0, dtype=torch.bfloat16),
            ]
            await plane.put("train", group, {"tokens": tokens, "note": ["a", {"b": [1, None]}]})
        await plane.claim("train", "trainer", columns=["tokens"], max_groups=1, owner="o", claim_id="c")
        (await Snapshot.take(plane, "train", await plane.groups("train"))).write(tmp_path)

        other, snapshot = await _plane(), Snapshot.read(tmp_path)
        await snapshot.put_back(other, "train", snapshot.groups)
        keys = await plane.keys("train")
        assert await other.keys("train") == keys
        before = await plane.read("train", keys, ("tokens", "note"))
        after = await other.read("train", keys, ("tokens", "note"))
        assert before["note"] == after["note"]
        for old, new in zip(before["tokens"], after["tokens"], strict=True):
            assert old.dtype == new.dtype
            assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))
        assert (await other.consumption("train", "trainer")).ready == 3

    run_virtual(main)


def test_a_snapshot_of_another_format_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        plane = await _plane()
        (await Snapshot.take(plane, "train", ())).write(tmp_path)
        index = tmp_path / "groups.json"
        index.write_text(index.read_text().replace('"format": 1', '"format": 9'))
        with pytest.raises(DataPlaneError, match="format 9"):
            Snapshot.read(tmp_path)

    run_virtual(main)
