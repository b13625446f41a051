"""Data sets of the `datasets` library: a folder that it saved, or its cache. Nothing is downloaded unless asked."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asyncrl.collectors.data.plain import plain
from asyncrl.engine.errors import ConfigError

_SAVED = ("dataset_info.json", "dataset_dict.json", "state.json")


class ArrowRecords:
    """The records of a `datasets.Dataset`, which it maps into memory; `name` is what errors call it."""

    def __init__(self, rows: Any, name: str) -> None:
        self._rows = rows
        self._name = name
        if not len(rows):
            raise ConfigError(f"{name} holds no record")

    def __len__(self) -> int:
        return len(self._rows)

    def number(self, index: int) -> int:
        return index + 1

    def place(self, index: int) -> str:
        return f"{self._name}, row {self.number(index)}"

    def read(self, index: int) -> Any:
        return plain(self._rows[index], self.place(index))


def is_saved_folder(path: Path) -> bool:
    """Say whether `datasets` saved this folder (`save_to_disk`)."""
    return any((path / name).is_file() for name in _SAVED)


def open_saved(path: Path, split: str | None) -> ArrowRecords:
    """Open a folder that `save_to_disk` wrote; ConfigError if it cannot be read or the split is not there."""
    datasets = _library(f"{str(path)!r} is a folder of datasets, which")
    try:
        found = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a folder of datasets: {error}") from error
    return ArrowRecords(*_split(found, split, str(path)))


def open_named(name: str, split: str | None, *, fetch: bool) -> ArrowRecords:
    """Open a data set `owner/name` or `owner/name:configuration` of the cache; downloads it first if `fetch`.

    ConfigError if it is not there.
    """
    datasets = _library(f"{name!r} does not exist: there is no such file or folder here; a data set of this name")
    path, _, configuration = name.partition(":")
    try:
        with _offline(datasets, not fetch):
            found = datasets.load_dataset(path, configuration or None)
    except Exception as error:  # The edge of a library that raises what its network and its readers raise.
        more = "" if fetch else ". If it is one, data.fetch true downloads it (--set data.fetch=true)"
        raise ConfigError(
            f"{name!r} does not exist: there is no such file or folder here, and datasets cannot load a data set of "
            f"this name{'' if fetch else ' from its cache'}: {error}{more}"
        ) from error
    return ArrowRecords(*_split(found, split, name))


def _split(found: Any, split: str | None, name: str) -> tuple[Any, str]:
    """Return one split of what `datasets` loaded, and its name in words."""
    if not isinstance(found, dict):
        if split is not None:
            raise ConfigError(f"{name} has no splits, and the split {split!r} was asked for; leave it out")
        return found, name
    chosen = next(iter(found)) if split is None and len(found) == 1 else split
    if chosen not in found:
        asked = "none was named" if split is None else f"{split!r} is not among them"
        raise ConfigError(f"{name} has the splits {', '.join(found)}, and {asked}; set data.split to one of them")
    return found[chosen], f"{name}, split {chosen}"


def _library(what: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"{what} needs the datasets library: install asyncrl[data]") from None
    return datasets


@contextmanager
def _offline(datasets: Any, offline: bool) -> Iterator[None]:
    """Keep `datasets` and the hub's client off the network within the context; both read these when they ask."""
    from huggingface_hub import constants

    places: tuple[Any, ...] = (datasets.config, constants) if offline else ()
    before = [place.HF_HUB_OFFLINE for place in places]
    for place in places:
        place.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = value
