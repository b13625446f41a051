"""Tensors in safetensors files of limited size, written from where they are and read part by part.

The format of safetensors: 8 bytes with the header's length, the header in JSON (by name: dtype, shape, where the bytes
are), then the bytes without gaps. The library writes it, from 0.8 on without a copy. It has no reader for it that takes
one part at a time into a buffer of the caller's.

Each part has a CRC-32 beside the manifest's SHA-256 of the file. The manifest is of what one process reads when the run
is begun again. The CRC-32 is of the bytes as they were in memory, and as a rank, perhaps on another node, got them. It
takes 0.4 s of a core per GB, beside training.
"""

import math
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from asyncrl.engine.bounds import MOST_DIMENSIONS
from asyncrl.engine.errors import CheckpointBroken
from asyncrl.trainers.backends.base import Place
from asyncrl.trainers.rank_state.index import Entry, Part

SHARD_BYTES = 4_000_000_000
"""The tensors of one file have at most so many bytes together; a single row of a tensor is never split."""
_MAX_HEADER_BYTES = 100_000_000  # As in safetensors itself.

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TYPES = {name: dtype for dtype, name in DTYPES.items()}


class _HeaderEntry(msgspec.Struct, frozen=True):
    """What a header says of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]

    def is_sound(self) -> bool:
        """Return whether the bytes are as many as type and shape need."""
        begin, end = self.data_offsets
        if self.dtype not in TYPES or begin < 0 or len(self.shape) > MOST_DIMENSIONS:
            return False
        if any(size < 0 for size in self.shape):
            return False
        return math.prod(self.shape) * TYPES[self.dtype].itemsize == end - begin


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of a tensor, with consecutive rows from `row` on."""

    name: str
    tensor: torch.Tensor
    row: int

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def part_offsets(self) -> tuple[int, ...]:
        return (self.row,) + (0,) * (self.tensor.ndim - 1) if self.tensor.ndim else ()


def write_shards(
    tensors: Mapping[str, torch.Tensor],
    folder: Path,
    *,
    stem: str,
    shard_bytes: int = SHARD_BYTES,
    places: Mapping[str, Place] = MappingProxyType({}),
) -> dict[str, Entry]:
    """Write tensors to `stem`-1.safetensors and on, each synced; return their entries.

    `places` are of those that are parts of a tensor. OSError if the disk refuses.
    """
    parts: dict[str, list[Part]] = {name: [] for name in tensors}
    for number, pieces in enumerate(_shards(tensors, shard_bytes), start=1):
        path = folder / f"{stem}-{number}.safetensors"
        for piece, crc32 in zip(pieces, _write(path, pieces), strict=True):
            offsets = piece.part_offsets
            if piece.name in places:
                offsets = tuple(a + b for a, b in zip(places[piece.name].offsets, offsets, strict=True))
            parts[piece.name].append(Part(path.name, offsets, tuple(piece.tensor.shape), crc32))
    return {
        name: Entry(DTYPES[tensor.dtype], whole_shape(name, tensor, places), tuple(parts[name]))
        for name, tensor in tensors.items()
    }


def whole_shape(name: str, tensor: torch.Tensor, places: Mapping[str, Place]) -> tuple[int, ...]:
    """Return the shape of the tensor that this one is, or is a part of."""
    return places[name].shape if name in places else tuple(tensor.shape)


class ShardFile:
    """A safetensors file that was found whole. CheckpointBroken if it is missing, cut or damaged."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._begin, self._header = _read_header(path)
        except FileNotFoundError:
            raise CheckpointBroken(f"{path} is missing") from None
        except OSError as error:
            raise CheckpointBroken(f"{path} cannot be read: {error}") from error

    def check(self, name: str, dtype: torch.dtype, part: Part) -> None:
        """CheckpointBroken if the file has no such part, or one of another type or shape."""
        found = self._header.get(name)
        if found is None:
            raise CheckpointBroken(f"{self._path} does not hold {name}, which its index names")
        if (found.dtype, found.shape) != (DTYPES[dtype], part.shape):
            raise CheckpointBroken(
                f"{self._path} holds {name} as {found.dtype} {list(found.shape)}; its index says {DTYPES[dtype]} "
                f"{list(part.shape)}"
            )

    def read(self, name: str, dtype: torch.dtype, part: Part) -> torch.Tensor:
        """Return a part that was checked. CheckpointBroken if its bytes are not those that were written."""
        begin, end = self._header[name].data_offsets
        data = torch.empty(end - begin, dtype=torch.uint8)
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._begin + begin)
                read = stream.readinto(_bytes(data))
        except OSError as error:
            raise CheckpointBroken(f"{self._path} cannot be read at {name}: {error}") from error
        crc32 = zlib.crc32(_bytes(data))
        if read != end - begin or crc32 != part.crc32:
            raise CheckpointBroken(f"{self._path} is damaged at {name}: its CRC-32 is {crc32}, not {part.crc32}")
        return data.view(dtype).reshape(part.shape)


def crc32_of(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of a tensor's bytes, wherever it is."""
    return zlib.crc32(_bytes(tensor))


def _shards(tensors: Mapping[str, torch.Tensor], limit: int) -> Iterator[list[_Piece]]:
    """Fill files one after the other."""
    pieces: list[_Piece] = []
    size = 0
    for name, tensor in tensors.items():
        for piece in _pieces(name, tensor, limit):
            # Two pieces of one tensor would have one name in a file.
            if pieces and (size + piece.nbytes > limit or pieces[-1].name == name):
                yield pieces
                pieces, size = [], 0
            pieces.append(piece)
            size += piece.nbytes
    if pieces:
        yield pieces


def _pieces(name: str, tensor: torch.Tensor, limit: int) -> Iterator[_Piece]:
    size = tensor.numel() * tensor.element_size()
    if size <= limit or not tensor.ndim:
        yield _Piece(name, tensor, 0)
        return
    rows = max(1, limit // (size // tensor.shape[0]))
    for row in range(0, tensor.shape[0], rows):
        yield _Piece(name, tensor[row : row + rows], row)


def _write(path: Path, pieces: Sequence[_Piece]) -> list[int]:
    """Write one file, and sync it; return the CRC-32 of each piece."""
    try:
        save_file({piece.name: piece.tensor.detach().contiguous() for piece in pieces}, path)
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
    return [crc32_of(piece.tensor) for piece in pieces]


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _read_header(path: Path) -> tuple[int, dict[str, _HeaderEntry]]:
    """Return where a file's tensors begin, and their entries; its size is just what these need."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        first = stream.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
        if 8 + length > size or length > _MAX_HEADER_BYTES:
            raise CheckpointBroken(f"{path} is damaged: it has {size} bytes, and its header alone needs {8 + length}")
        try:
            entries = msgspec.json.decode(stream.read(length), type=dict[str, _HeaderEntry])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CheckpointBroken(f"{path} is damaged: its header cannot be read: {error}") from error
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        if entry.data_offsets[0] != at or not entry.is_sound():
            raise CheckpointBroken(f"{path} is damaged: its header gives {name} bytes that it cannot have")
        at = entry.data_offsets[1]
    if 8 + length + at != size:
        raise CheckpointBroken(f"{path} is damaged: it has {size} bytes, and its tensors need {8 + length + at}")
    return 8 + length, entries
