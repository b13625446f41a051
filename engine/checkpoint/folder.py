"""One checkpoint is one folder, `checkpoints/v000050`, that is whole or not there.

    v000050/state.json      what the loop knows (state.py)
    v000050/run.json        the configuration
    v000050/trainer/        the ranks' files: weights, moments
    v000050/groups/         the groups that are not trained yet, with their tensors
    v000050/manifest.json   the size and SHA-256 of every file above; written last

Invariant: a folder under its own name has been whole once: it is written as `v000050.new`, each file is synced, and it
is renamed after its manifest. What was damaged since is found when it is read, and an older one stands in for it.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from asyncrl.engine.bounds import LARGEST_JSON, read_bytes, read_text
from asyncrl.engine.errors import CheckpointBroken

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
STATE, RUN = "state.json", "run.json"
TRAINER, GROUPS = "trainer", "groups"
FORMAT = 1
_NAME = re.compile(r"v(\d{6,})")
_CHUNK = 1 << 20


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes and SHA-256 of one file."""

    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint consists of. `after` is the number of the last event of the log that it holds."""

    format: int
    version: int
    after: int
    files: dict[str, File]


def name_of(version: int) -> str:
    """Return the name of a version's folder."""
    return f"v{version:06d}"


def begin(folder: Path, *, attempt: int = 1) -> Path:
    """Make the folder in which `folder` is written aside, with places for ranks and groups, and return it.

    Each attempt of a process has a number of its own: one that was given up may still be writing.
    """
    new = folder.with_name(f"{folder.name}.{attempt}.new")
    shutil.rmtree(new, ignore_errors=True)
    for place in (TRAINER, GROUPS):
        (new / place).mkdir(parents=True)
    return new


def finish(new: Path, folder: Path, *, version: int, after: int) -> None:
    """Sync what was written into `new`, write its manifest, and put it in the place of `folder`."""
    files = {}
    for path in _files(new):
        _sync(path)
        size = path.stat().st_size
        if path.suffix == ".json" and size > LARGEST_JSON:  # It could not be read again.
            raise CheckpointBroken(f"{path} has {size:,} bytes, and {LARGEST_JSON:,} at most are read")
        files[path.relative_to(new).as_posix()] = File(size, _sha256(path))
    manifest = Manifest(format=FORMAT, version=version, after=after, files=files)
    (new / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    for path in (new / MANIFEST, *(path for path in new.rglob("*") if path.is_dir()), new):
        _sync(path)
    old = _old(folder)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    new.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def discard(new: Path) -> None:
    """Remove what was written aside and did not become whole."""
    shutil.rmtree(new, ignore_errors=True)


def check(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint whose files are all what it says; CheckpointBroken names one that is not."""
    path = folder / MANIFEST
    try:
        manifest = msgspec.json.decode(read_bytes(path, LARGEST_JSON, CheckpointBroken), type=Manifest)
        if manifest.format != FORMAT:
            raise CheckpointBroken(f"{folder} is of format {manifest.format}, and this asyncrl reads {FORMAT}")
        for name, file in manifest.files.items():
            _check_file(folder, name, file)
    except FileNotFoundError as error:
        raise CheckpointBroken(f"{error.filename} is missing") from error
    except OSError as error:
        raise CheckpointBroken(f"{folder} cannot be read: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointBroken(f"{path} cannot be read: {error}") from error
    lacking = [name for name in (STATE, RUN) if name not in manifest.files]
    if lacking:
        raise CheckpointBroken(f"{path} names no {lacking[0]}")
    return manifest


def read_json(path: Path) -> str:
    """Return the text of one of the files of JSON; CheckpointBroken if it is too large or is not text."""
    try:
        return read_text(path, LARGEST_JSON, CheckpointBroken)
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointBroken(f"{path} cannot be read: {error}") from error


def newest_first(folder: Path) -> list[Path]:
    """List the checkpoints in a folder. One that a crash caught between two renames is put back first."""
    if not folder.is_dir():
        return []
    for old in folder.glob("v*.old"):
        whole = old.with_name(old.name.removesuffix(".old"))
        if whole.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(whole)
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name[1:]), reverse=True)


def set_aside(folder: Path) -> None:
    """Rename a broken checkpoint: what is done without it makes it one of another history."""
    broken = folder.with_name(f"{folder.name}.broken")
    shutil.rmtree(broken, ignore_errors=True)
    folder.rename(broken)


def prune(folder: Path, *, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, and what a crash has left half-written."""
    for path in (*newest_first(folder)[keep:], *folder.glob("v*.new")):
        shutil.rmtree(path, ignore_errors=True)


def _check_file(folder: Path, name: str, file: File) -> None:
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise CheckpointBroken(f"{folder / MANIFEST} names {name!r}, which is not in its folder")
    size = path.stat().st_size
    if size != file.bytes:
        raise CheckpointBroken(f"{path} has {size} bytes, and its manifest says {file.bytes}")
    if _sha256(path) != file.sha256:
        raise CheckpointBroken(f"{path} is not what was written: its SHA-256 differs from its manifest's")


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _old(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.old")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
