"""docs/event-log.md is the schema: every type and field stands in it, and no other."""

import re
from pathlib import Path
from types import UnionType
from typing import get_args

import msgspec
import pytest

from asyncrl.engine.events.log import EventLog, effective_events, read_events
from asyncrl.engine.events.types import SCHEMA, AnyEvent, RunEnded
from asyncrl.engine.trace.validation import problems

GOLDEN = Path(__file__).parents[3] / "traces" / "schema-1.jsonl"
DOCUMENT = Path(__file__).parents[4] / "docs" / "event-log.md"


def test_the_document_names_every_type_with_its_fields() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)`(?: \([23]\))? \| ([^|]*) \|", text, flags=re.MULTILINE)
    written = {name: re.findall(r"`(\w+)`", fields) for name, fields in rows}
    real = {
        str(kind.__struct_config__.tag): [
            field.name for field in msgspec.structs.fields(kind) if field.name not in ("seq", "t", "wall")
        ]
        for kind in AnyEvent.__args__
    }
    assert written == real
    assert f"Schema {SCHEMA}" in text


def test_what_came_with_a_later_schema_has_a_default_or_a_type_of_its_own() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for kind in AnyEvent.__args__:
        [row] = [line for line in text.splitlines() if line.startswith(f"| `{kind.__struct_config__.tag}`")]
        later = set(re.findall(r"`(\w+)` \([23]\)", row.split("|")[2]))
        for field in msgspec.structs.fields(kind):
            if field.name in later:
                assert not field.required, (kind, field.name)


SAMPLES: dict[str, object] = {
    "int": 1,
    "str": "x",
    "float": 0.5,
    "list": [],
    "dict": {},
    "bool": False,
    "Scores": {"prompts": 1, "samples": 1, "failed_samples": 0},
}


def of_schema_1(kind: type[AnyEvent], row: str) -> bytes:
    """A line as schema 1 wrote it: the fields that are not marked as later."""
    later = set(re.findall(r"`(\w+)` \([23]\)", row.split("|")[2]))
    line: dict[str, object] = {"type": kind.__struct_config__.tag}
    for field in msgspec.structs.fields(kind):
        if field.name not in later:
            first = get_args(field.type)[0] if isinstance(field.type, UnionType) else field.type
            name = getattr(first, "__origin__", first)
            line[field.name] = SAMPLES.get(getattr(name, "__name__", ""))
    return msgspec.json.encode(line)


@pytest.mark.parametrize("kind", AnyEvent.__args__, ids=lambda kind: str(kind.__struct_config__.tag))
def test_every_type_is_read_as_schema_1_wrote_it(kind: type[AnyEvent], tmp_path: Path) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    [row] = [line for line in text.splitlines() if line.startswith(f"| `{kind.__struct_config__.tag}`")]
    path = tmp_path / "events.jsonl"
    path.write_bytes(of_schema_1(kind, row) + b"\n")
    [event] = read_events(path)
    assert type(event) is kind
    defaults = {field.name: field.default for field in msgspec.structs.fields(kind) if not field.required}
    for name in re.findall(r"`(\w+)` \([23]\)", row.split("|")[2]):
        assert getattr(event, name) == defaults[name]


def test_a_log_of_schema_1_is_gone_on_with_by_this_asyncrl(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    old = list(read_events(GOLDEN))
    path.write_bytes(GOLDEN.read_bytes())
    log = EventLog(clock=lambda: 0.0, wall=lambda: 0.0, path=path)
    after, last = old[len(old) // 2].seq, old[-1].seq
    log.resume("checkpoints/1", after=after)
    log.append(RunEnded(code=130, reason="interrupted"))
    log.close()
    assert list(problems(tmp_path)) == []
    assert [event.seq for event in effective_events(path)] == [*range(after + 1), last + 1, last + 2]
