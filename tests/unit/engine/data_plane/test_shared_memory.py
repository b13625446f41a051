"""Payloads in shared memory: mapped without a copy, private to the reader, gone with their owner."""

import errno
import gc
import os
import time
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.engine.data_plane.codec import row_parts
from asyncrl.engine.data_plane.rows import assemble
from asyncrl.engine.data_plane.shared_memory import SharedMemory, shared_directory
from asyncrl.engine.errors import DataPlaneError, MissingRows, StoreFull

PARTS = [torch.arange(5, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8), torch.full((3,), 9, dtype=torch.uint8)]


def test_the_parts_come_back_as_one_buffer_also_to_another_client(tmp_path: Path) -> None:
    owner = SharedMemory.create(tmp_path)
    owner.write("a", PARTS)
    assert SharedMemory.open(owner.path).map("a").tolist() == [0, 1, 2, 3, 4, 9, 9, 9]


def test_what_a_reader_writes_stays_with_that_reader(tmp_path: Path) -> None:
    memory = SharedMemory.create(tmp_path)
    memory.write("a", PARTS)
    memory.map("a").zero_()
    assert memory.map("a").tolist() == [0, 1, 2, 3, 4, 9, 9, 9]


def test_a_mapped_payload_outlives_its_removal_and_a_removed_one_is_missing(tmp_path: Path) -> None:
    memory = SharedMemory.create(tmp_path)
    memory.write("a", PARTS)
    mapped = memory.map("a")
    memory.remove(["a", "never there"])
    assert mapped.tolist() == [0, 1, 2, 3, 4, 9, 9, 9]
    with pytest.raises(MissingRows):
        memory.map("a")


def test_what_was_read_stays_as_it_was_when_its_row_and_the_directory_are_gone(tmp_path: Path) -> None:
    """FOUND-BENCH: reads hand out views of the mapping, of rows that others clear meanwhile."""
    memory = SharedMemory.create(tmp_path)
    columns = {"x": [torch.arange(5000), torch.ones(3, dtype=torch.int64)], "y": [torch.ones(2), torch.zeros(0)]}
    memory.write("a", row_parts("v0_p0", ["v0_p0_g0", "v0_p0_g1"], columns))
    values = assemble(["v0_p0_g1", "v0_p0_g0"], ["x", "y"], {"v0_p0": memory.map("a")}, copy=False)
    memory.remove(["a"])
    memory.write("a", row_parts("v0_p1", ["v0_p1_g0"], {"x": [torch.full((5000,), 7)]}))
    memory.close()
    gc.collect()
    assert values["x"][1].untyped_storage().nbytes() >= 40_000, "a copy, where a view was expected"
    for name, column in columns.items():
        assert all(torch.equal(got, put) for got, put in zip(values[name][::-1], column, strict=True))


def test_a_name_that_leads_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    """FOUND-I12: names of payloads stand in tags, which another writer may have put."""
    memory = SharedMemory.create(tmp_path)
    outside = tmp_path / "else"
    outside.write_bytes(b"kept")
    for name in ("../else", str(outside), "", ".", "..", "lock"):
        for use in (lambda n: memory.remove([n]), memory.map, lambda n: memory.write(n, PARTS)):
            with pytest.raises(DataPlaneError, match="cannot be a payload"):
                use(name)
    assert outside.read_bytes() == b"kept"


def test_the_directory_is_the_users_alone_and_goes_with_its_owner(tmp_path: Path) -> None:
    owner = SharedMemory.create(tmp_path)
    assert owner.path.stat().st_mode & 0o077 == 0
    SharedMemory.open(owner.path).close()
    assert owner.path.is_dir()
    owner.close()
    owner.close()
    assert list(tmp_path.iterdir()) == []


def own_until_killed(directory: Path, tell: Connection) -> None:
    tell.send(SharedMemory.create(directory).path.name)
    time.sleep(60)


def test_what_a_killed_owner_left_goes_with_the_next_start_and_a_living_ones_stays(tmp_path: Path) -> None:
    living = SharedMemory.create(tmp_path)
    names, tell = Pipe(duplex=False)
    other = get_context("fork").Process(target=own_until_killed, args=(tmp_path, tell))
    other.start()
    try:
        assert names.poll(30)
        left = names.recv()
        SharedMemory.create(tmp_path).close()
        assert {path.name for path in tmp_path.iterdir()} == {living.path.name, left}
    finally:
        other.kill()
        other.join(30)
    SharedMemory.create(tmp_path).close()
    assert {path.name for path in tmp_path.iterdir()} == {living.path.name}


def test_what_a_killed_owner_left_goes_before_room_is_looked_for(tmp_path: Path) -> None:
    """FOUND-C12: with `auto` leftovers would else fill the memory, and then nobody would come to remove them."""
    left = SharedMemory.create(tmp_path)
    assert left._lock is not None
    os.close(left._lock)  # As the kernel does for a process that is killed.
    shared_directory("auto", usual=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_process_of_another_host_is_told_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(DataPlaneError, match="shared_memory: null"):
        SharedMemory.open(tmp_path / "asyncrl-elsewhere")


def test_a_directory_that_cannot_be_written_to_is_an_error_with_the_options_name(tmp_path: Path) -> None:
    with pytest.raises(DataPlaneError, match=r"data_plane\.shared_memory"):
        SharedMemory.create(tmp_path / "missing")


def test_without_room_nothing_stays_and_the_error_says_what_to_do(tmp_path: Path) -> None:
    memory = SharedMemory.create(tmp_path, capacity_rows=1)
    memory.write("a", PARTS)
    with pytest.raises(StoreFull, match="its 1 rows"):
        memory.write("b", PARTS)
    memory.remove(["a"])
    memory.write("b", PARTS)


class Full(torch.Tensor):
    """Bytes for which no room is left."""

    def numpy(self, *, force: bool = False) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_file_system_is_a_full_store(tmp_path: Path) -> None:
    memory = SharedMemory.create(tmp_path)
    with pytest.raises(StoreFull, match="MiB free; enlarge it"):
        memory.write("a", [PARTS[0], PARTS[2].as_subclass(Full)])
    assert [path.name for path in memory.path.iterdir()] == ["lock"]


def test_the_option_stands_for_a_directory() -> None:
    assert shared_directory(None) is None
    assert shared_directory("/somewhere") == Path("/somewhere")
    assert shared_directory("auto") in (None, Path("/dev/shm"))
