"""From the path in the configuration to records: by what is there, a file, a folder or a name."""

from collections import Counter
from pathlib import Path

from asyncrl.collectors.data.columns import Columns
from asyncrl.collectors.data.hugging_face import is_saved_folder, open_named, open_saved
from asyncrl.collectors.data.jsonl import JsonlFile
from asyncrl.collectors.data.parquet import ParquetFile
from asyncrl.collectors.data.prompts import NamedSet
from asyncrl.collectors.data.records import Records
from asyncrl.collectors.data.renderer import Shot
from asyncrl.configs.sections.task import Data, DataSet
from asyncrl.engine.errors import ConfigError, DataError

_JSONL = (".jsonl", ".ndjson")
_PARQUET = ".parquet"


def open_sets(data: Data) -> list[NamedSet]:
    """Open all sets of a configuration; ConfigError for one that is not there, is empty or shares its name."""
    entries = data.sets if data.path is None else [DataSet(path=data.path, split=data.split)]
    names = [entry.name or Path(entry.path).stem or entry.path for entry in entries]
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise ConfigError(f"data.sets has two sets called {twice[0]!r}; give them a name each, ids begin with it")
    return [
        NamedSet(name, open_records(entry.path, entry.split, fetch=data.fetch), entry.weight)
        for name, entry in zip(names, entries, strict=True)
    ]


def open_records(given: str, split: str | None = None, *, fetch: bool = False) -> Records:
    """Open one set by its path: a .jsonl or .parquet file, a folder that `datasets` saved, or a name in its cache."""
    path = Path(given)
    if path.is_dir():
        if not is_saved_folder(path):
            raise ConfigError(
                f"{given} is a folder that datasets did not save (save_to_disk); name its files in data.sets"
            )
        return open_saved(path, split)
    suffix = path.suffix.lower()
    if not path.exists() and suffix not in (*_JSONL, _PARQUET, ".json") and not path.is_absolute():
        return open_named(given, split, fetch=fetch)
    if path.exists() and not path.is_file():
        raise ConfigError(f"{given} is a pipe or a device; records are read in any order, so it must be a regular file")
    if split is not None:
        raise ConfigError(f"{given} is a file, and the split {split!r} was asked for; files have none, leave it out")
    try:
        return _open_file(path, suffix)
    except OSError as error:
        raise ConfigError(f"{given} cannot be read: {error.strerror}") from error


def _open_file(path: Path, suffix: str) -> Records:
    if suffix in _JSONL:
        return JsonlFile(path)
    if suffix == _PARQUET:
        path.stat()
        return ParquetFile(path)
    if not path.exists():
        raise ConfigError(f"{path} does not exist")
    raise ConfigError(
        f"{path} must end in .jsonl (one JSON object per line) or .parquet; rename it if it is JSONL, or convert it"
    )


def open_shots(data: Data) -> list[Shot]:
    """Return the examples of `data.few_shot`; ConfigError, with the entry, for one without prompt or answer."""
    if isinstance(data.few_shot, str):
        try:
            records = open_records(data.few_shot)
        except ConfigError as error:
            raise ConfigError(f"data.few_shot: {error}") from error
        columns = Columns(data.prompt_column, data.answer_column)
        given = [(records.read(index), records.place(index)) for index in range(len(records))]
    else:
        columns = Columns("prompt", "answer")
        given = [(entry, f"data.few_shot, entry {number}") for number, entry in enumerate(data.few_shot)]
    return [_shot(columns, value, place) for value, place in given]


def _shot(columns: Columns, value: object, place: str) -> Shot:
    record = columns.check(value, place)
    if not isinstance(record.prompt, str) or not record.answer:
        raise DataError(f"{place}: an example needs a prompt that is a text, and an answer")
    return Shot(record.prompt, record.answer)
