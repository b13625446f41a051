"""Code that a configuration names, and whose word it is: the user's, or that of a file which may be another's.

A recorded configuration (of an event log, a checkpoint, a run's folder) is data until it is carried out: then what it
names is imported. So what only the record names is refused, unless the user names it too.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from asyncrl.configs.load import Override
from asyncrl.engine.errors import ConfigError

RUNS_MORE = {
    "reward.functions": "code",  # It runs what a model answers: with another's model and prompts, another's code.
    "environment.name": "verifiers",  # Its options name modules, and programs that the model may run.
}
"""What is built in and runs more than itself."""


def named_code(values: Iterable[tuple[str, Any]]) -> list[str]:
    """Return every `module:Name` and `file.py:Name` among values by path, and what RUNS_MORE has, each once.

    Names alone, of what is built in or installed (entry points), are not code of a file.
    """
    return list(dict.fromkeys(name for path, value in values for name in _names(path, value)))


def code_of(overrides: Iterable[Override]) -> list[str]:
    """Return the code that overrides name."""
    return named_code((override.path, override.value) for override in overrides)


def check_code(values: Mapping[str, Any], recorded: Iterable[Override], *, allowed: Iterable[str], source: str) -> None:
    """ConfigError if values in force, by path, name code that only `recorded` named, what the file `source` holds.

    `allowed` is what the user named: in other values and options, and with --allow-code. Nothing is imported.
    """
    theirs = frozenset(code_of(recorded)).difference(allowed)
    refused = [name for name in named_code(values.items()) if name in theirs]
    if not refused:
        return
    built_in = [name for name in refused if name in RUNS_MORE.values()]
    why = f" ({', '.join(built_in)}: built in, and runs what others wrote)" if built_in else ""
    raise ConfigError(
        f"{source} names code, which would run with your rights: {', '.join(refused)}{why}. If you know it, add "
        f"{' '.join(f'--allow-code {name}' for name in refused)} (in Python: allow_code={refused})"
    )


def _names(path: str, value: Any) -> Iterator[str]:
    if path in ("filters", "reward.functions"):
        yield from (name for name in _entries(value) if ":" in name or name == RUNS_MORE.get(path))
    elif path == "environment.options" and isinstance(value, dict):
        yield from _names("environment.options.function", value.get("function"))
    elif path in ("task.name", "environment.name", "environment.options.function") and isinstance(value, str):
        yield from [value] if ":" in value or value == RUNS_MORE.get(path) else []


def _entries(value: Any) -> Iterator[str]:
    """Yield the names of entries, also of those in a chain of filters within the chain."""
    for entry in value if isinstance(value, list) else ():
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, dict):
            if isinstance(entry.get("name"), str):
                yield entry["name"]
            yield from _entries(entry.get("filters"))
