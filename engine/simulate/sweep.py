"""Several configurations side by side: parsing a sweep, a table, and a plot in plain text."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.configs import Override, RunConfig, flatten, parse_value
from asyncrl.engine.errors import ConfigError

_BAR = 40

# The columns of the table: figure and heading.
COLUMNS: Mapping[str, str] = {
    "mean_age": "mean age",
    "trained_share": "trained share",
    "step_seconds": "s/step",
    "cycle_seconds": "s/cycle",
    "groups_per_second": "groups/s",
    "tokens_per_second": "tokens/s",
    "trainer_idle": "trainer idle",
    "generators_idle": "generators idle",
    "buffer_mean": "buffer",
    "length_ratio": "length ratio",
}


@dataclass(frozen=True, slots=True)
class Sweep:
    """One value of the configuration, by its path, in several settings."""

    path: str
    values: Sequence[Any]

    def overrides(self) -> list[Override]:
        return [Override(self.path, value, f"--sweep {self.path}={value}") for value in self.values]


def parse_sweep(text: str, config: RunConfig) -> Sweep:
    """Parse `max_staleness=0,1,2`; a path may be given by its last part if that is unique. ConfigError if not."""
    name, equals, values = text.partition("=")
    if not equals or not values.strip():
        raise ConfigError(f"--sweep {text}: write it as name=value,value,…")
    paths = list(flatten(config))
    found = [path for path in paths if path == name.strip() or path.rpartition(".")[2] == name.strip()]
    if len(found) != 1:
        close = difflib.get_close_matches(name.strip(), [*paths, *(p.rpartition(".")[2] for p in paths)], n=1)
        hint = f"; did you mean {close[0]}?" if close and not found else ""
        known = f"it could be {', '.join(found)}" if found else f"no key has that name{hint}"
        raise ConfigError(f"--sweep {text}: {known}")
    return Sweep(found[0], [parse_value(value.strip(), f"--sweep {text}") for value in values.split(",")])


def table(title: str, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return a table with one line per setting."""
    cells = [[title, *COLUMNS.values()]]
    cells += [[name, *(_cell(figures[key]) for key in COLUMNS)] for name, figures in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


def plot(title: str, rows: Sequence[tuple[str, Mapping[str, Any]]], keys: Sequence[str]) -> str:
    """Draw figures as bars, each scaled to its own largest value."""
    out = []
    wide = max(len(name) for name, _ in rows)
    for key in keys:
        values = [float(figures[key] or 0.0) for _, figures in rows]
        top = max(values) or 1.0
        out.append(f"{COLUMNS[key]} by {title}")
        out += [
            f"  {name:>{wide}} {'█' * round(_BAR * value / top)} {_cell(value)}"
            for (name, _), value in zip(rows, values, strict=True)
        ]
    return "\n".join(out)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
