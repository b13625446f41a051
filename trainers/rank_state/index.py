"""The index of what one rank wrote: every tensor's parts, and the rank's random states, in JSON.

A tensor may consist of parts, of one rank or of several. Ranks that hold whole replicas write each tensor as one part.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.engine.bounds import LARGEST_JSON, read_bytes
from asyncrl.engine.errors import CheckpointBroken

FORMAT = 1
_PATTERN = "rank-?????.json"


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A box of a tensor, under the tensor's name in a safetensors file: where it begins, and how far it goes.

    Rows 2 and 3 of a (4, 5) tensor: offsets (2, 0), shape (2, 5). `crc32` is of the part's bytes.
    """

    file: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    crc32: int


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor: its type by safetensors' names, its whole shape, and the parts that this rank wrote."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


class RandomStates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """States of random number generators: of torch (bytes in hexadecimal), Python and NumPy's global one.

    `cuda` is of the rank's own GPU, None without one.
    """

    torch: str
    cuda: str | None
    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, tuple[int, ...], int, int, float]


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `rank` of `ranks` wrote at a version. `frozen`: CRC-32 of weights that are not trained and not written."""

    format: int
    rank: int
    ranks: int
    version: int
    tensors: dict[str, Entry]
    frozen: dict[str, int]
    random: RandomStates

    def write(self, folder: Path) -> Path:
        """Write the index with its checksum; return its path."""
        body = msgspec.to_builtins(self)
        path = folder / index_name(self.rank)
        path.write_text(json.dumps({"crc32": _crc32(body), "index": body}) + "\n", encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: Path) -> "Index":
        """CheckpointBroken if the file is missing, damaged, or of another format."""
        try:
            content = json.loads(read_bytes(path, LARGEST_JSON, CheckpointBroken))
        except FileNotFoundError:
            raise CheckpointBroken(f"{path} is missing") from None
        except CheckpointBroken:
            raise
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointBroken(f"{path} cannot be read: {error}") from error
        body = content.get("index") if isinstance(content, dict) else None
        if not isinstance(body, dict) or content.get("crc32") != _crc32(body):
            raise CheckpointBroken(f"{path} is damaged: its checksum is not that of its content")
        if body.get("format") != FORMAT:
            raise CheckpointBroken(f"{path} is of format {body.get('format')!r}; this asyncrl reads format {FORMAT}")
        try:
            return msgspec.convert(body, cls)
        except msgspec.ValidationError as error:
            raise CheckpointBroken(f"{path} is not an index: {error}") from error


def index_name(rank: int) -> str:
    return f"rank-{rank:05}.json"


def read_indexes(folder: Path) -> list[Index]:
    """Return the indexes of all ranks, in order. CheckpointBroken if one is missing, or is of another save."""
    first = Index.read(folder / index_name(0))
    found = {path.name for path in folder.glob(_PATTERN)}
    expected = {index_name(rank) for rank in range(min(first.ranks, len(found) + 1))}
    for name in sorted(expected ^ found):
        what = "missing" if name in expected else f"of no rank: the state is of {first.ranks}"
        raise CheckpointBroken(f"{folder / name} is {what}")
    indexes = [first, *(Index.read(folder / index_name(rank)) for rank in range(1, first.ranks))]
    for rank, index in enumerate(indexes):
        if (index.rank, index.ranks, index.version) != (rank, first.ranks, first.version):
            raise CheckpointBroken(
                f"{folder / index_name(rank)} is of rank {index.rank} of {index.ranks} at version {index.version}; "
                f"that of rank 0 is of {first.ranks} ranks at version {first.version}"
            )
    return indexes


def _crc32(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
