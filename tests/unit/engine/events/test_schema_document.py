"""docs/event-log.md is the schema: every type and field stands in it, and no other."""

import re
from pathlib import Path

import msgspec

from asyncrl.engine.events.types import SCHEMA, AnyEvent

DOCUMENT = Path(__file__).parents[4] / "docs" / "event-log.md"


def test_the_document_names_every_type_with_its_fields() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)`(?: \(2\))? \| ([^|]*) \|", text, flags=re.MULTILINE)
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
        later = set(re.findall(r"`(\w+)` \(2\)", row.split("|")[2]))
        for field in msgspec.structs.fields(kind):
            if field.name in later:
                assert not field.required, (kind, field.name)
