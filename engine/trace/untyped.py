"""What the types of events leave open, checked as a log is read: tags, keys, and measured log-ratios.

It trusts the event's own fields; whether they fit the events before is for those who follow them.
"""

import re
from typing import Annotated, Any, Literal

import msgspec

from asyncrl.engine.errors import TraceError
from asyncrl.engine.events.types import AnyEvent, Measured, Put
from asyncrl.engine.records.generated import read_generated
from asyncrl.engine.records.keys import is_sample_key

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_SPANS = re.compile(r"(\d{1,15}:\d{1,15}(,\d{1,15}:\d{1,15})*)?")
_MEANS = {"spans": "version:first", "generated": "first:end"}


class _NotFinite(msgspec.Struct):
    """A number that JSON has not, in its written form."""

    float: Literal["nan", "inf", "-inf"]


_Number = float | _NotFinite


class _Tags(msgspec.Struct):
    """The tags that every group carries, as far as they are there; others may be anything that a log can hold."""

    group: _Count = 0
    prompt: int | str = 0
    dataset: str = ""
    version: _Count = 0
    end_version: _Count = 0
    prompt_tokens: _Count = 0
    response_tokens: list[_Count] = []
    trainable_tokens: list[_Count] = []
    reward: list[_Number | bool | None] = []
    status: list[str] = []
    cause: list[str | None] = []
    spans: list[str] = []
    generated: list[str] = []


def check_untyped(event: AnyEvent) -> None:
    """Refuse an event whose open fields hold what no run writes: TraceError with event, group, tag and numbers."""
    match event:
        case Put():
            try:
                _check_put(event)
            except ValueError as error:  # A ValidationError is one.
                raise TraceError(f"event {event.seq}, put of group {event.group}: {error}") from error
        case Measured():
            try:
                msgspec.convert(event.log_ratios, dict[str, tuple[_Number, _Number]])
            except msgspec.ValidationError as error:
                raise TraceError(f"event {event.seq}, measured of batch {event.batch}: {error}") from error


def _check_put(event: Put) -> None:
    size = len(event.keys)
    odd = [key for key in event.keys if not is_sample_key(key)]
    if odd or len(set(event.keys)) != size or not size:
        raise ValueError(f"its keys are {event.keys[:3]}; they must be sample keys, each once, at least one")
    for name, value in event.tags.items():
        if isinstance(value, list) and len(value) != size:
            raise ValueError(f"tag {name!r} has {len(value)} values for {size} samples")
    tags: Any = msgspec.convert(event.tags, _Tags)
    if event.tags.get("group", event.group) != event.group:
        raise ValueError(f"its tags are of group {event.tags['group']}")
    for name, means in _MEANS.items():
        for text in getattr(tags, name):
            if not _SPANS.fullmatch(text):
                raise ValueError(f"tag {name!r} holds {text!r}; it must be {means}, joined by commas")
    for text, tokens in zip(tags.generated, tags.response_tokens, strict=False):
        read_generated(text, tokens)
