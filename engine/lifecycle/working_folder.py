"""The user's working folder, packed for the other nodes of a cluster: code, presets and small data."""

import os
import zipfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

import structlog

from asyncrl.engine.errors import ConfigError

log = structlog.get_logger()

LARGEST_FILE_BYTES = 16 << 20
"""A larger file stays here, with a warning: a checkpoint or a data set, which is read where the run was started."""
MOST_BYTES = 256 << 20
"""All files together; with more, whoever started in a home folder waits for minutes."""
MOST_FILES = 20_000

INSIDE = "working-folder"
"""Where the files are in the package. Ray puts its root first on the path of every Python that it starts, where a file
`random.py` would hide Python's own, and the process would not start."""

_LEFT_OUT = ("__pycache__", "runs", "node_modules", "*.egg-info")
_NAMED = 3
_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)


def enter_copy() -> str:
    """Make this process, which Ray has started in a package's root, work in the copy of the user's folder in it."""
    copy = Path.cwd() / INSIDE
    if copy.is_dir():
        os.chdir(copy)
    return str(Path.cwd())


def pack_folder(folder: Path, into: Path, *, exclude: Sequence[str] = ()) -> int:
    """Write the files of `folder` to the zip file `into`; returns how many. The same files give the same bytes.

    Hidden files, virtual environments, `runs/`, large files and those that match `exclude`, as paths from `folder` or
    as names, stay out. ConfigError, with the largest, if the others are too many.
    """
    found: list[tuple[str, int]] = []
    large: list[str] = []
    total = 0
    for name in _files(folder, exclude):
        size = (folder / name).stat().st_size
        if size > LARGEST_FILE_BYTES:
            large.append(name)
            continue
        found.append((name, size))
        total += size
        if len(found) > MOST_FILES or total > MOST_BYTES:
            break
    _check(folder, found)
    if large:
        log.warning("large files of the working folder stay here", files=sorted(large)[:_NAMED], of=len(large))
    with zipfile.ZipFile(into, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed:
        for name, _ in sorted(found):
            # Ray names the package by its content: a time in it would send the same folder again and again.
            entry = zipfile.ZipInfo(f"{INSIDE}/{name}", _ZIP_EPOCH)
            entry.external_attr = (folder / name).stat().st_mode << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            packed.writestr(entry, (folder / name).read_bytes())
    return len(found)


def _files(folder: Path, exclude: Sequence[str]) -> Iterator[str]:
    """Yield the paths of files that may go, from `folder`."""
    seen: set[str] = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        # A link that leads back up would be followed for ever.
        real = os.path.realpath(place)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        at = Path(place).relative_to(folder)
        folders[:] = sorted(
            name for name in folders if _goes(at / name, exclude) and not Path(place, name, "pyvenv.cfg").exists()
        )
        for name in files:
            if _goes(at / name, exclude) and Path(place, name).is_file():
                yield str(at / name)


def _goes(path: Path, exclude: Sequence[str]) -> bool:
    if path.name.startswith("."):
        return False
    return not any(fnmatch(path.name, p) or fnmatch(str(path), p.rstrip("/")) for p in (*_LEFT_OUT, *exclude))


def _check(folder: Path, found: Sequence[tuple[str, int]]) -> None:
    size = sum(size for _, size in found)
    if len(found) <= MOST_FILES and size <= MOST_BYTES:
        return
    by_top: dict[str, int] = {}
    for name, bytes_ in found:
        top = Path(name).parts[0]
        by_top[top] = by_top.get(top, 0) + bytes_
    largest = sorted(by_top, key=by_top.__getitem__, reverse=True)[:_NAMED]
    raise ConfigError(
        f"the working folder {folder} would go to every node of the cluster, and has at least {len(found)} "
        f"files of {size >> 20} MiB, where {MOST_FILES} and {MOST_BYTES >> 20} MiB may go; the largest found are "
        f"{', '.join(f'{name} ({by_top[name] >> 20} MiB)' for name in largest)}. Start in a folder of the run's own, "
        "or name in cluster.exclude what may stay here"
    )
