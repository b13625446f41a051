"""A partition as files, without pickle: tags in JSON, tensors in safetensors. For checkpoints, which do not exist yet.

It is written and read through the plane's own operations, so it is the same for every backend. A
snapshot holds whole groups, claimed or not; restored ones are ready again, under the same keys.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from asyncrl.engine.data_plane.base import DataPlane
from asyncrl.engine.errors import DataPlaneError
from asyncrl.engine.records import GroupMeta

_INDEX = "groups.json"
_TENSORS = "columns.safetensors"
_FORMAT = 1


async def save_partition(plane: DataPlane, partition: str, columns: Sequence[str], folder: Path) -> int:
    """Write all whole groups of a partition with `columns`; return how many."""
    groups = await plane.groups(partition)
    keys = [key for group in groups for key in group.keys]
    values = await plane.read(partition, keys, columns)
    tensors: dict[str, torch.Tensor] = {}
    objects: dict[str, dict[str, Any]] = {column: {} for column in columns}
    for column in columns:
        for key, value in zip(keys, values[column], strict=True):
            if isinstance(value, torch.Tensor):
                tensors[f"{column}/{key}"] = value.contiguous()
            else:
                objects[column][key] = value
    index = {
        "format": _FORMAT,
        "columns": list(columns),
        "objects": objects,
        "groups": [{"keys": group.keys, "tags": dict(group.tags)} for group in groups],
    }
    _write(folder, index, tensors)
    return len(groups)


async def restore_partition(plane: DataPlane, partition: str, folder: Path) -> list[GroupMeta]:
    """Put a saved partition's groups back, in order; DataPlaneError if the files are of another format."""
    index, tensors = _read(folder)
    restored = []
    for entry in index["groups"]:
        group = GroupMeta(tuple(entry["keys"]), entry["tags"])
        columns = {
            column: [
                tensors[f"{column}/{key}"] if f"{column}/{key}" in tensors else index["objects"][column][key]
                for key in group.keys
            ]
            for column in index["columns"]
        }
        await plane.put(partition, group, columns)
        restored.append(group)
    return restored


def _write(folder: Path, index: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / _TENSORS)
    (folder / _INDEX).write_text(json.dumps(index), encoding="utf-8")


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    index: dict[str, Any] = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
    if index.get("format") != _FORMAT:
        raise DataPlaneError(f"{folder} is a snapshot of format {index.get('format')}; this is {_FORMAT}")
    return index, load_file(folder / _TENSORS)
