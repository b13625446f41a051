"""A folder of a saved model: replaced whole, found again after a crash, and the note in it that says what it is.

Invariant: at every moment the folder, or `NAME.old` beside it, is one whole saved model, once there was one.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from asyncrl.engine.errors import ConfigError
from asyncrl.engine.model.settings import read_json

LAST, BEST, ADAPTER = "model", "model-best", "adapter"
EVALUATED = "model-evaluated"
"""A version that is evaluated, until it is known whether it is the best."""
NOTE = "asyncrl.json"
ADAPTER_CONFIG = "adapter_config.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Note:
    """What `asyncrl.json` in the folder says of the model.

    `version` counts the training batches that the weights have had, which is also the step that made them.
    `mean_reward` is of the last `reward_window` judged batches, None if there was no reward. `config` is the SHA-256
    of the run's configuration. `characters`: its tokens are those of the built-in character tokenizer. `source` is the
    model that training began with, and `lora_rank` the rank of the adapter that was trained, None for all weights.
    `best_by` says by what the run chooses its `model-best`, "evaluation" or "reward" (None: it keeps none).
    `evaluation` has `pass_at_1` and `reward` of this version, if they were known when the folder was written.
    """

    version: int
    step: int
    mean_reward: float | None
    reward_window: int
    config: str
    characters: bool = False
    source: str | None = None
    lora_rank: int | None = None
    best_by: str | None = None
    evaluation: dict[str, Any] | None = None

    @classmethod
    def read(cls, folder: Path) -> "Note | None":
        """Read a folder's note; None for a folder of other origin. ConfigError for a note that says nothing."""
        if not (folder / NOTE).is_file():
            return None
        found = read_json(folder / NOTE)
        if found.pop("format", None) != FORMAT:
            raise ConfigError(f"{folder / NOTE} is of another format than {FORMAT}; read it with the asyncrl it is of")
        known = {one.name for one in fields(cls)}
        try:
            return cls(**{name: value for name, value in found.items() if name in known})
        except TypeError as error:
            raise ConfigError(f"{folder / NOTE} cannot be read: {error}") from error

    def write(self, folder: Path) -> None:
        """Write the note into a folder."""
        content = {"format": FORMAT, **asdict(self)}
        (folder / NOTE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def find_folder(folder: Path) -> Path | None:
    """Return where the model of this folder is: there, or beside it if a crash came between two renames; else None."""
    return next((place for place in (folder, _beside(folder, "old")) if (place / NOTE).is_file()), None)


def replace_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Have `fill` write the files into a new folder, and put it in the place of `folder` once they are on disk.

    Whatever is raised, `folder` is as it was before, and nothing half-written is left.
    """
    new, old = _beside(folder, "new"), _beside(folder, "old")
    _take_back(folder)
    shutil.rmtree(new, ignore_errors=True)
    try:
        new.mkdir(parents=True)
        fill(new)
        for path in (*new.iterdir(), new):
            _sync(path)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        _take_back(folder)
    shutil.rmtree(old, ignore_errors=True)


def link_files(source: Path, target: Path) -> None:
    """Give `target` the files of `source`: weights as further names of the same bytes, where the disk can do that."""
    for path in source.iterdir():
        if path.suffix == ".safetensors":
            try:
                os.link(path, target / path.name)
                continue
            except OSError:  # A file system without links, or over its number of them.
                pass
        shutil.copy2(path, target / path.name)


def instead_of_adapter(folder: Path) -> str:
    """Say which whole model to take in place of an adapter's folder, `RUN/model` for `RUN/adapter`."""
    merged = folder.with_name(folder.name.replace(ADAPTER, LAST))
    if folder.name.startswith(ADAPTER) and (merged / "config.json").is_file():
        return f"take {merged}, into which it is merged"
    return "merge it into its model (merge_and_unload of peft), save that with its tokenizer, and take the folder"


def copy_saved(source: Path, target: Path, note: Note) -> None:
    """Put the model of `source` in the place of `target`, with this note, and so its adapter, if one lies beside it."""

    def fill(new: Path) -> None:
        link_files(source, new)
        note.write(new)

    replace_folder(target, fill)
    adapter = source.with_name(source.name.replace(LAST, ADAPTER))
    if adapter.is_dir():
        replace_folder(target.with_name(target.name.replace(LAST, ADAPTER)), lambda new: link_files(adapter, new))


def remove_saved(folder: Path) -> None:
    """Remove a saved model, its adapter, and what a crash left beside them; nothing happens if they are not there."""
    for name in (folder.name, folder.name.replace(LAST, ADAPTER)):
        for place in (folder.with_name(name), *(_beside(folder.with_name(name), what) for what in ("new", "old"))):
            shutil.rmtree(place, ignore_errors=True)


def _beside(folder: Path, what: str) -> Path:
    return folder.with_name(f"{folder.name}.{what}")


def _take_back(folder: Path) -> None:
    old = _beside(folder, "old")
    if old.exists() and not folder.exists():
        old.rename(folder)


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
