"""Files that others may have written are read up to a size, larger than that of any file that asyncrl writes.

Invariant: no more than the limit is read into memory, whatever the size of a file is or claims to be.
"""

import stat
from pathlib import Path

from asyncrl.engine.errors import AsyncRLError

LARGEST_JSON = 256 << 20
"""Bytes of a file of JSON in a checkpoint, or in the folder of a model, whose tokenizer has some tens of MiB."""
MOST_DIMENSIONS = 64
"""A tensor of a file has at most so many dimensions, as in NumPy: the product of a million sizes takes minutes."""


def read_bytes(path: Path, largest: int, error: type[AsyncRLError]) -> bytes:
    """Return the content of a file; `error` if it has more than `largest` bytes. OSError if it cannot be read."""
    about = path.stat()
    # A pipe without a writer is never opened, and a device has no end.
    if not stat.S_ISREG(about.st_mode):
        raise error(f"{path} is not a regular file")
    if about.st_size <= largest:
        with path.open("rb") as stream:
            return stream.read(about.st_size)
    raise error(f"{path} has {about.st_size:,} bytes; such a file has {largest:,} at most")


def read_text(path: Path, largest: int, error: type[AsyncRLError]) -> str:
    """Return the content of a file in UTF-8, as `read_bytes` does; UnicodeDecodeError if it is not text."""
    return read_bytes(path, largest, error).decode("utf-8")
