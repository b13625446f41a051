"""A saved state, of however many ranks, as one set of named tensors."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from asyncrl.engine.errors import CheckpointBroken
from asyncrl.trainers.backends.base import Place
from asyncrl.trainers.rank_state.boxes import what_is_wrong
from asyncrl.trainers.rank_state.index import Entry, Part, RandomStates, index_name, read_indexes
from asyncrl.trainers.rank_state.shards import DTYPES, TYPES, ShardFile, crc32_of, whole_shape

_SHOWN = 4


class SavedState:
    """What all ranks wrote to a folder. Opening it reads indexes and headers, and checks that all parts are there."""

    def __init__(self, folder: Path) -> None:
        indexes = read_indexes(folder)
        self._folder = folder
        self._indexes = indexes
        self._entries: dict[str, Entry] = {}
        self._files: dict[str, ShardFile] = {}
        for index in indexes:
            for name, entry in index.tensors.items():
                self._entries[name] = self._joined(name, entry, index.rank)
        for name, entry in self._entries.items():
            wrong = what_is_wrong(entry.shape, entry.parts)
            if wrong:
                raise CheckpointBroken(f"{folder}: {name} is not whole: {wrong}")
            for part in entry.parts:
                self._file(part).check(name, TYPES[entry.dtype], part)

    @property
    def version(self) -> int:
        return self._indexes[0].version

    @property
    def ranks(self) -> int:
        """How many ranks wrote it."""
        return len(self._indexes)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    def random(self, rank: int) -> RandomStates | None:
        """Return the random states of a rank; None if there were fewer ranks."""
        return self._indexes[rank].random if rank < self.ranks else None

    def check(
        self,
        tensors: Mapping[str, torch.Tensor],
        frozen: Mapping[str, torch.Tensor],
        places: Mapping[str, Place] = MappingProxyType({}),
    ) -> None:
        """CheckpointBroken unless it has just these tensors, of these types and shapes, and the same frozen weights.

        `places` are of tensors that are parts; the shapes of whole ones are compared.
        """
        self._check_names("", self.names, set(tensors))
        for name, tensor in tensors.items():
            entry, expected = self._entries[name], (DTYPES.get(tensor.dtype), whole_shape(name, tensor, places))
            if (entry.dtype, entry.shape) != expected:
                raise CheckpointBroken(
                    f"{self._where(name)}: {name} is {entry.dtype} {list(entry.shape)}; the run's is {expected[0]} "
                    f"{list(expected[1])}"
                )
        saved = {name: crc32 for index in self._indexes for name, crc32 in index.frozen.items()}
        self._check_names("frozen ", set(saved), set(frozen))
        for name, tensor in frozen.items():
            if crc32_of(tensor) != saved[name]:
                raise CheckpointBroken(
                    f"{self._folder / index_name(0)}: the frozen weight {name} is another one now; start from the "
                    "model that the saved run started from (model.path)"
                )

    def read_into(self, name: str, target: torch.Tensor, place: Place | None = None) -> None:
        """Copy a checked tensor, joined from its parts, into `target`, on whichever device that is.

        With a `place`, `target` is that part of it, and only files that hold some of it are read.
        """
        entry, begins = self._entries[name], (0,) * target.ndim if place is None else place.offsets
        for part in entry.parts:
            # Along each dimension: where what both have begins and ends, counted in the whole tensor.
            both = [
                (max(at, begin), min(at + size, begin + length))
                for at, size, begin, length in zip(part.offsets, part.shape, begins, target.shape, strict=True)
            ]
            if any(first >= end for first, end in both):
                continue
            value = self._file(part).read(name, TYPES[entry.dtype], part)
            source = tuple(slice(first - at, end - at) for (first, end), at in zip(both, part.offsets, strict=True))
            into = tuple(slice(first - at, end - at) for (first, end), at in zip(both, begins, strict=True))
            with torch.no_grad():
                target.detach()[into].copy_(value[source])

    def _joined(self, name: str, entry: Entry, rank: int) -> Entry:
        """Join the parts of a rank with those of the ranks before it."""
        if entry.dtype not in TYPES:
            raise CheckpointBroken(f"{self._folder / index_name(rank)}: {name} has the unknown type {entry.dtype!r}")
        before = self._entries.get(name)
        if before is None:
            return entry
        if (before.dtype, before.shape) != (entry.dtype, entry.shape):
            raise CheckpointBroken(
                f"{self._folder / index_name(rank)}: {name} is {entry.dtype} {list(entry.shape)}, and before it was "
                f"{before.dtype} {list(before.shape)}"
            )
        return Entry(entry.dtype, entry.shape, before.parts + entry.parts)

    def _file(self, part: Part) -> ShardFile:
        if part.file not in self._files:
            if Path(part.file).name != part.file or not part.file.endswith(".safetensors"):
                raise CheckpointBroken(f"{self._folder}: {part.file!r} is not the name of a file of tensors")
            self._files[part.file] = ShardFile(self._folder / part.file)
        return self._files[part.file]

    def _where(self, name: str) -> Path:
        parts = self._entries[name].parts
        return self._folder / (parts[0].file if parts else index_name(0))

    def _check_names(self, kind: str, found: set[str] | frozenset[str], expected: set[str]) -> None:
        for what, names in (("lacks", sorted(expected - found)), ("has unknown", sorted(found - expected))):
            if names:
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                raise CheckpointBroken(
                    f"{self._folder / index_name(0)} {what} {kind}tensors: {', '.join(names[:_SHOWN])}{more}; resume "
                    "with the model and the options of the saved run"
                )
