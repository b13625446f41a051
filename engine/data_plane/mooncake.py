"""A client of Mooncake's store, which keeps the bytes of rows in the memory of other processes, also of other nodes.

Invariant: an object is written once and never changed, under the name of its put. So bytes that were read while their
object existed, before and after, are whole: what was removed during a read is noticed, whatever took its memory.

What the file guards against, each measured: Mooncake links to the libraries of RDMA even for TCP; a client without a
master waits for 90 s; an object may not be empty; a lease of reading would keep a removed object for seconds.
"""

import ctypes
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from asyncrl.engine.errors import DataPlaneError, MissingRows, StoreFull

SYSTEM_PACKAGES = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")
# In the order in which they need each other.
_LIBRARIES = ("libnl-3.so.200", "libnl-route-3.so.200", "libibverbs.so.1")
_NO_ROOM, _NOT_FOUND = -200, -704
_ERRORS = {-800: "a storage process cannot be reached", -900: "its master cannot be reached"}
_SETUP_TRIES = "3"


@dataclass(frozen=True, slots=True)
class MooncakeAddress:
    """What a process needs to use a running store."""

    master: str
    protocol: str = "tcp"
    devices: str = ""


def library_folder() -> Path:
    """Return where scripts/install unpacks the system's libraries if it may not install them."""
    return Path(sys.prefix) / "lib" / "mooncake"


def fault_of_installation() -> str | None:
    """Say what Mooncake lacks in this environment, with the command that brings it; None if it can be imported."""
    if find_spec("mooncake") is None:
        return "Mooncake is not installed here: scripts/install mooncake, or pip install 'asyncrl[mooncake]'"
    missing = [library for library in _LIBRARIES if not _loads(library)]
    if missing:
        return (
            f"Mooncake needs the system libraries {', '.join(missing)}, also for TCP: "
            f"apt-get install {' '.join(SYSTEM_PACKAGES)}, or without root scripts/install mooncake"
        )
    # Read when it is imported.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", _SETUP_TRIES)
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        return f"Mooncake cannot be imported: {error}"
    return None


def load() -> Any:
    """Import Mooncake's store, with the libraries that it links to; DataPlaneError names what is missing."""
    fault = fault_of_installation()
    if fault is not None:
        raise DataPlaneError(fault)
    return importlib.import_module("mooncake.store")


def _loads(library: str) -> bool:
    """Load a library for all that links to it."""
    for place in (str(library_folder() / library), library):
        try:
            ctypes.CDLL(place, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return True
    return False


class MooncakeStore:
    """One process's client. With `segment_bytes` it also lends the store that much of its memory. Calls block."""

    def __init__(self, address: MooncakeAddress, host: str, *, segment_bytes: int = 0) -> None:
        """Connect from this node's address `host`; DataPlaneError if the master does not answer."""
        module = load()
        # Read when a client is made. The address is this process's own: nodes have different ones.
        os.environ["MC_TCP_BIND_ADDRESS"] = host
        self._closed = False
        self._store = module.MooncakeDistributedStore()
        code = self._store.setup(
            host, "P2PHANDSHAKE", segment_bytes, 0, address.protocol, address.devices, address.master
        )
        if code:
            raise DataPlaneError(
                f"no Mooncake store at {address.master} over {address.protocol} from {host}: error {code}; "
                "its master may be gone, or the network or device may not be there (data_plane.mooncake_protocol)"
            )
        self._pinned = module.ReplicateConfig()
        # Else it could be evicted, and nobody would notice before it is read.
        self._pinned.with_hard_pin = True

    def write(self, name: str, parts: Sequence[torch.Tensor]) -> None:
        """Write the bytes of `parts`, not all empty, one after the other; StoreFull, and nothing stays, without room.

        The same name twice is a DataPlaneError, or changes nothing.
        """
        whole = torch.cat(list(parts))
        with self._registered([whole]):
            code = self._store.batch_put_from([name], [whole.data_ptr()], [whole.nbytes], self._pinned)[0]
        if code == _NO_ROOM:
            raise StoreFull(
                f"Mooncake has no room for {whole.nbytes >> 10} KiB; enlarge data_plane.mooncake_segment_gib or "
                "data_plane.storage_units"
            )
        _check(code, f"write {whole.nbytes} bytes")

    def read(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Return objects as uint8 tensors (bytes,) of the reader's own; MissingRows if one is gone."""
        sizes = self._sizes(names)
        buffers = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        with self._registered(buffers):
            codes = self._store.batch_get_into(list(names), [buffer.data_ptr() for buffer in buffers], sizes)
        check_read(names, codes)
        if any(there != 1 for there in self._store.batch_is_exist(list(names))):
            raise MissingRows("a row was cleared while it was read")
        return buffers

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects; those that are gone are ignored."""
        for name, code in zip(names, self._store.batch_remove(list(names), True) if names else (), strict=True):
            if code != _NOT_FOUND:
                _check(code, f"remove the row {name}")

    def close(self) -> None:
        """Leave the store; what this process lent it is gone. Idempotent."""
        if not self._closed:
            self._closed = True
            self._store.close()

    def _sizes(self, names: Sequence[str]) -> list[int]:
        found: Mapping[str, Any] = self._store.batch_get_replica_desc(list(names))
        if len(found) < len(set(names)):
            # Without its master nothing is found either.
            _check(min(self._store.is_exist(names[0]), 0), "find a row")
            raise MissingRows(f"{len(set(names)) - len(found)} of {len(names)} rows are not in the store")
        return [found[name][0].get_memory_descriptor().buffer_descriptor.size for name in names]

    @contextmanager
    def _registered(self, buffers: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let the network read and write buffers: RDMA moves bytes of registered memory alone."""
        for buffer in buffers:
            self._store.register_buffer(buffer.data_ptr(), buffer.nbytes)
        try:
            yield
        finally:
            for buffer in buffers:
                self._store.unregister_buffer(buffer.data_ptr())


def check_read(names: Sequence[str], codes: Sequence[int]) -> None:
    """Look at what came of the reads of rows, a size or an error's code (below 0) each, before a byte is used.

    MissingRows, or DataPlaneError, names the first row that was not read.
    """
    for name, code in zip(names, codes, strict=True):
        if code == _NOT_FOUND:
            raise MissingRows(f"the row {name} was cleared while it was read")
        _check(min(code, 0), f"read the row {name}")


def _check(code: int, action: str) -> None:
    if code:
        raise DataPlaneError(f"Mooncake could not {action}: error {code} ({_ERRORS.get(code, 'see its log')})")
