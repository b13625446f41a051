"""A checkpoint's folder: whole or not there, and what was damaged since is found and named."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.engine.checkpoint import folder as on_disk
from asyncrl.engine.errors import CheckpointBroken

FILES = ("state.json", "run.json", "trainer/rank0.safetensors", "groups/groups.json", "manifest.json")


def made(directory: Path, version: int, content: str = "content") -> Path:
    """Make a checkpoint with a few bytes in each file."""
    folder = directory / on_disk.name_of(version)
    new = on_disk.begin(folder)
    for name in FILES[:-1]:
        (new / name).write_text(f"{name}: {content}")
    on_disk.finish(new, folder, version=version, after=7)
    return folder


def test_a_checkpoint_is_whole_under_its_own_name_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    folder = made(tmp_path, 50)
    manifest = on_disk.check(folder)
    assert (manifest.version, manifest.after, set(manifest.files)) == (50, 7, set(FILES[:-1]))
    assert [path.name for path in tmp_path.iterdir()] == ["v000050"]


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_cut_changed_or_gone_is_named(name: str, tmp_path: Path) -> None:
    whole = made(tmp_path / "whole", 1) / name
    size = whole.stat().st_size
    for place in range(0, size, max(1, size // 7)):
        folder = shutil.copytree(tmp_path / "whole/v000001", tmp_path / f"cut{place}")
        (folder / name).write_bytes(whole.read_bytes()[:place])
        with pytest.raises(CheckpointBroken, match=name):
            on_disk.check(folder)
    folder = tmp_path / "whole/v000001"
    (folder / name).write_bytes(bytes([whole.read_bytes()[0] ^ 1]) + whole.read_bytes()[1:])
    with pytest.raises(CheckpointBroken, match=name):
        on_disk.check(folder)
    (folder / name).unlink()
    with pytest.raises(CheckpointBroken, match=f"{name} is missing"):
        on_disk.check(folder)


def test_a_crash_while_a_checkpoint_is_written_leaves_the_one_before(tmp_path: Path) -> None:
    """Whatever is in the folder aside, it is not found; the next checkpoint of that version replaces it."""
    before = made(tmp_path, 50)
    torn = on_disk.begin(tmp_path / "v000100")
    (torn / "state.json").write_text("{")
    assert on_disk.newest_first(tmp_path) == [before]
    after = made(tmp_path, 100)
    assert on_disk.newest_first(tmp_path) == [after, before]
    on_disk.check(after)


def test_a_crash_between_two_renames_loses_no_checkpoint(tmp_path: Path) -> None:
    folder = made(tmp_path, 50, "old")
    folder.rename(tmp_path / "v000050.old")
    assert on_disk.newest_first(tmp_path) == [folder]
    on_disk.check(folder)


def test_a_checkpoint_of_the_same_version_takes_the_place_of_the_older_one(tmp_path: Path) -> None:
    made(tmp_path, 50, "old")
    folder = made(tmp_path, 50, "new")
    assert (folder / "state.json").read_text() == "state.json: new"
    on_disk.check(folder)


def test_the_newest_ones_are_kept(tmp_path: Path) -> None:
    for version in (9, 10, 100, 1_000_000):
        made(tmp_path, version)
    on_disk.begin(tmp_path / "v000011")
    on_disk.prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000100", "v1000000"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text.replace('"format":1', '"format":9'), "format 9"),
        (lambda text: text.replace("run.json", "../run.json"), "not in its folder"),
        (lambda text: text.replace('"state.json"', '"other.json"'), "other.json is missing"),
        (lambda text: "[" * 100_000, "cannot be read"),
    ],
)
def test_a_manifest_that_cannot_be_ours_is_refused(change: Callable[[str], str], says: str, tmp_path: Path) -> None:
    folder = made(tmp_path, 1)
    manifest = folder / "manifest.json"
    manifest.write_text(change(manifest.read_text()))
    with pytest.raises(CheckpointBroken, match=says):
        on_disk.check(folder)
