"""What every key of the configuration means: one text for `asyncrl config --explain` and docs/configuration.md."""

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from asyncrl.configs.allowed import allowed_at
from asyncrl.configs.load import flatten, load
from asyncrl.configs.schema import RunConfig
from asyncrl.engine.errors import ConfigError

_HEAD = """# Configuration reference

Every key, what it takes, its default and what it means. `asyncrl config` prints the values in force and where each
came from; `asyncrl config --explain KEY` prints one entry of this page. Set a key in a YAML file (`--config FILE`) or
with `--set section.key=value`. This page is written by `python -m asyncrl.configs.reference`.
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One key: its dotted path, what it takes, its default as JSON, and its meaning in one paragraph."""

    path: str
    takes: str
    default: str
    meaning: str


def explain(key: str | None = None) -> list[Entry]:
    """Return the entries of a key, of a section, or of all (None); a key may leave out its section.

    ConfigError, with a suggestion, if no key is named so. Example: `max_staleness` gives `rollout.max_staleness`.
    """
    defaults = flatten(load().config)
    entries = [
        Entry(path, allowed_at(RunConfig, path.split(".")) or "a map", json.dumps(defaults[path]), meaning)
        for path, meaning in _meanings(RunConfig)
    ]
    if key is None:
        return entries
    found = [entry for entry in entries if key in (entry.path, *_short_names(entry.path))]
    if not found:
        raise ConfigError(_unknown(key, [entry.path for entry in entries]))
    return found


def markdown() -> str:
    """Return docs/configuration.md."""
    parts, section = [_HEAD], None
    for entry in explain():
        name = entry.path.partition(".")[0]
        if name != section:
            section = name
            parts.append(f"## {section}\n\n| key | takes | default | meaning |\n|---|---|---|---|")
        cells = (f"`{entry.path}`", entry.takes, f"`{entry.default}`", entry.meaning)
        parts.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return re.sub(r"\n## ", "\n\n## ", "\n".join(parts)).replace("\n\n\n", "\n\n") + "\n"


def _meanings(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        kind: Any = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _meanings(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _paragraph(field)


def _paragraph(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def _short_names(path: str) -> Sequence[str]:
    """Return what else a path goes by: its section, and its last part."""
    section, _, name = path.partition(".")
    return (section, name) if name else (section,)


def _unknown(key: str, paths: Sequence[str]) -> str:
    names = [*paths, *dict.fromkeys(short for path in paths for short in _short_names(path))]
    close = difflib.get_close_matches(key, names, n=1)
    hint = f"did you mean {close[0]}?" if close else "`asyncrl config --explain` lists all"
    return f"--explain {key}: the configuration has no such key; {hint}"


if __name__ == "__main__":
    import sys

    sys.stdout.write(markdown())
