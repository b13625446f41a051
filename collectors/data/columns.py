"""From a record to what a prompt is made of, by the names of its fields."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.configs.sections.task import Data
from asyncrl.engine.errors import DataError

Messages = Sequence[Mapping[str, Any]]
_LARGEST_ID = 2**63


@dataclass(frozen=True, slots=True)
class Record:
    """A checked record: its prompt is a text or chat messages; id and dataset are None where it names none."""

    prompt: str | Messages
    answer: str
    id: int | str | None
    dataset: str | None
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Columns:
    """Names of the fields of a record; None for what it does not have."""

    prompt: str
    answer: str | None
    id: str | None = None
    dataset: str | None = None

    @classmethod
    def of(cls, data: Data) -> "Columns":
        """Return the names of a configuration."""
        return cls(data.prompt_column, data.answer_column, data.id_column, data.dataset_column)

    def check(self, value: Any, place: str) -> Record:
        """Return a record; DataError, with place and field, if it cannot be used."""
        if not isinstance(value, Mapping):
            raise DataError(f"{place} is {_short(value)}; a record must be a JSON object")
        prompt = self._field(value, "prompt", place)
        if isinstance(prompt, list):
            _check_messages(prompt, f"{place}, field {self.prompt!r}")
        elif not isinstance(prompt, str) or not prompt:
            raise _bad(place, self.prompt, prompt, "a text or a list of chat messages")
        answer = None if self.answer is None else self._field(value, "answer", place)
        if answer is None and self.answer is not None:
            raise _bad(place, self.answer, answer, "a text or another JSON value")
        given = None if self.id is None else self._field(value, "id", place)
        if self.id is not None and not _is_id(given):
            raise _bad(place, self.id, given, "a text or an integer of 64 bits")
        dataset = None if self.dataset is None else self._field(value, "dataset", place)
        if self.dataset is not None and not (isinstance(dataset, str) and dataset):
            raise _bad(place, self.dataset, dataset, "a text")
        return Record(prompt, _text(answer), given, dataset, value)

    def _field(self, value: Mapping[str, Any], which: str, place: str) -> Any:
        name = getattr(self, which)
        if name in value:
            return value[name]
        none = "; set it to null if records have none" if which == "answer" else ""
        there = ", ".join(map(repr, value)) or "none"
        raise DataError(f"{place} has no field {name!r} (data.{which}_column){none}; its fields are {there}")


def _check_messages(messages: list[Any], what: str) -> None:
    for number, message in enumerate(messages):
        fits = isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not fits:
            raise DataError(f"{what}, message {number}, is {_short(message)}; it needs role and content, both texts")
    if not messages:
        raise DataError(f"{what} is an empty list; it needs at least one message")
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"{what} ends with a message of the assistant, which is what the model is to write; leave it out"
        )


def _text(answer: Any) -> str:
    if answer is None:
        return ""
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


def _is_id(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return (isinstance(value, str) and value != "") or (isinstance(value, int) and -_LARGEST_ID <= value < _LARGEST_ID)


def _bad(place: str, field: str, value: Any, must: str) -> DataError:
    return DataError(f"{place}, field {field!r}, is {_short(value)}; it must be {must}")


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
