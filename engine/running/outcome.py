"""How a run came out: its summary, alone, or with what ended it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from asyncrl.engine.bounds import read_bytes
from asyncrl.engine.errors import AsyncRLError, NotWritten, TraceError
from asyncrl.engine.events.summary import FILE_NAME

_LARGEST_FILE = 16 << 20
"""Bytes. A summary has some thousands."""
# What is written otherwise than it is kept, or not at all.
_NOT_PLAIN = {"directory", "exit_code", "exit_reason", "trained_age_histogram"}


@dataclass(frozen=True, slots=True, repr=False)
class Summary:
    """What a run came to; the content of its `summary.json`, and the `directory` that has it.

    Rewards are means over all samples judged in the first or last 10 batches, None where there was no batch;
    `reward_parts` has such means (`first_10`, `last_10`) of each reward function. `trained_age_histogram` counts
    trained samples by age, in weight versions. `ledger` counts samples by fate, `skipped_records` the records of data
    sets that were left out, by reason. `model` names the folders of saved models with their version and mean reward,
    and counts failed saves; None if the run saves none.
    `evaluation` has the first, last and best evaluation, and counts those that ended, failed or were left out; None
    without any. `engine_busy_share` is the mean over steps of the metric `engine/busy_share`. `exit_code` is the
    command's: 0 done, 1 failed, 128 and a signal's number: interrupted.
    """

    directory: Path
    exit_code: int
    exit_reason: str
    steps: int
    batches: int
    seconds_total: float
    seconds_to_first_step: float | None
    reward_first_10: float | None
    reward_last_10: float | None
    reward_trained_last_10: float | None
    trained_tokens: int
    generated_tokens: int
    trained_age_histogram: Mapping[int, int]
    trained_age_max: int | None
    length_bias: Mapping[str, Any]
    alarms: Sequence[Mapping[str, Any]]
    ledger: Mapping[str, Any]
    data_plane_keys_left: int | None
    filters: Mapping[str, Any]
    reward_parts: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    reward_on_failure_samples: int = 0
    engine_busy_share: float | None = None
    evaluation: Mapping[str, Any] | None = None
    model: Mapping[str, Any] | None = None
    skipped_records: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, content: Mapping[str, Any], directory: Path) -> "Summary":
        """Return the summary that `summary.json` has the content of."""
        return cls(
            directory=directory,
            exit_code=content["exit"]["code"],
            exit_reason=content["exit"]["reason"],
            trained_age_histogram={int(age): count for age, count in content["trained_age_histogram"].items()},
            **{name: content[name] for name in _plain() if name in content},
        )

    @classmethod
    def read(cls, directory: str | Path) -> "Summary":
        """Read the summary of a run that has ended; FileNotFoundError if the folder has none, TraceError if damaged."""
        file = Path(directory) / FILE_NAME
        try:
            return cls.of(json.loads(read_bytes(file, _LARGEST_FILE, TraceError)), Path(directory))
        except TraceError:
            raise
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise TraceError(f"{file} is not the summary of a run: {error!r}") from error

    def to_dict(self) -> dict[str, Any]:
        """Return what `summary.json` holds."""
        return {
            **{name: getattr(self, name) for name in _plain()},
            "trained_age_histogram": {str(age): count for age, count in self.trained_age_histogram.items()},
            "exit": {"code": self.exit_code, "reason": self.exit_reason},
        }

    def __repr__(self) -> str:
        ages = ", ".join(f"{age}: {count}" for age, count in self.trained_age_histogram.items()) or "none"
        return (
            f"Summary({self.exit_reason} (exit {self.exit_code}) after {self.steps} steps, {self.batches} batches, "
            f"{self.seconds_total:.0f} s; reward {_figure(self.reward_first_10)} in the first 10 batches, "
            f"{_figure(self.reward_last_10)} in the last 10; trained ages {ages}; in {self.directory})"
        )


def _plain() -> list[str]:
    """Return the fields that `summary.json` has under the same names."""
    return [field.name for field in fields(Summary) if field.name not in _NOT_PLAIN]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


class RunFailed(AsyncRLError, RuntimeError):
    """A run came to an end by an error: `__cause__` is the first one, `summary` says how far it came.

    `lost` are the files of the run that could not be written.
    """

    def __init__(self, message: str, summary: Summary, lost: Sequence[NotWritten] = ()) -> None:
        super().__init__(message, summary, lost)
        self.summary = summary
        self.lost = tuple(lost)

    def __str__(self) -> str:
        return str(self.args[0])


class RunInterrupted(KeyboardInterrupt):
    """A run was ended in order by Ctrl-C, SIGTERM or SIGHUP; `summary` says how far it came."""

    def __init__(self, message: str, summary: Summary) -> None:
        super().__init__(message, summary)
        self.summary = summary

    def __str__(self) -> str:
        return str(self.args[0])
