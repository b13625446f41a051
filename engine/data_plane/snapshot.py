"""Groups of a partition as files, without pickle: tags in JSON, tensors in safetensors.

They are read and put back through the plane's own operations, so that files are the same for every backend. A
snapshot holds whole groups, claimed or not; ones that are put back are ready again, under the same keys.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from asyncrl.engine.bounds import LARGEST_JSON, read_bytes
from asyncrl.engine.data_plane.base import Column, DataPlane
from asyncrl.engine.errors import DataPlaneError
from asyncrl.engine.records import GroupMeta

_INDEX = "groups.json"
_TENSORS = "columns.safetensors"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Groups, and by column and key the values that came with their puts."""

    groups: Sequence[GroupMeta]
    columns: Mapping[str, Mapping[str, Any]]

    @classmethod
    async def take(cls, plane: DataPlane, partition: str, groups: Sequence[GroupMeta]) -> "Snapshot":
        """Read groups from a plane; MissingRows if one is not there any more."""
        names = (await plane.partition(partition)).columns
        keys = [key for group in groups for key in group.keys]
        values = await plane.read(partition, keys, names) if keys and names else {name: [] for name in names}
        # A plane may answer with views of memory that it uses again once the rows are cleared.
        return cls(groups, {name: dict(zip(keys, map(_own, values[name]), strict=True)) for name in names})

    async def put_back(self, plane: DataPlane, partition: str, groups: Sequence[GroupMeta]) -> None:
        """Put some of its groups into a plane, in order."""
        for group in groups:
            columns: dict[str, Column] = {
                name: [values[key] for key in group.keys] for name, values in self.columns.items()
            }
            await plane.put(partition, group, columns)

    def write(self, folder: Path) -> None:
        """Write two files into a folder."""
        tensors: dict[str, torch.Tensor] = {}
        objects: dict[str, dict[str, Any]] = {name: {} for name in self.columns}
        for name, values in self.columns.items():
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{name}/{key}"] = value
                else:
                    objects[name][key] = value
        groups = [{"keys": group.keys, "tags": dict(group.tags)} for group in self.groups]
        index = {"format": _FORMAT, "objects": objects, "groups": groups}
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / _TENSORS)
        (folder / _INDEX).write_text(json.dumps(index), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Snapshot":
        """Read what `write` wrote; DataPlaneError if the files are of another format, or not whole."""
        try:
            index = json.loads(read_bytes(folder / _INDEX, LARGEST_JSON, DataPlaneError))
            if index["format"] != _FORMAT:
                raise DataPlaneError(f"{folder} is a snapshot of format {index['format']}; this is {_FORMAT}")
            tensors = load_file(folder / _TENSORS)
            groups = [GroupMeta(tuple(entry["keys"]), entry["tags"]) for entry in index["groups"]]
            columns: dict[str, dict[str, Any]] = {name: dict(values) for name, values in index["objects"].items()}
            for name, values in columns.items():
                for key in (key for group in groups for key in group.keys if key not in values):
                    values[key] = tensors[f"{name}/{key}"]
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError, OSError, SafetensorError) as error:
            raise DataPlaneError(f"{folder} cannot be read as a snapshot: {error!r}") from error
        return cls(groups, columns)


def _own(value: Any) -> Any:
    return value.contiguous().clone() if isinstance(value, torch.Tensor) else value
