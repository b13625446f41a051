"""The prose of guides, docstrings, messages and comments keeps those rules of style that a pattern can check."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
GUIDES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")),
]
CODE = [
    "collectors",
    "configs",
    "filters",
    "trainers/fan_out.py",
    "trainers/planning",
    "engine/cli",
    "engine/data_plane",
    "engine/events",
    "engine/records",
    "engine/simulate",
    "engine/trace/cutting.py",
    "engine/trace/difference.py",
    "engine/trace/recording.py",
    "engine/trace/tensors.py",
    "engine/trace/validation.py",
]

_COUNTED = "one|once|twice|rows?|tokens?|seconds|files?|updates?|tensors?|values?|objects?|FLOPs|bytes|judgements?"
_PER = "group|row|second|step|file|sample|batch|rank|key|response|line|event|version|put|column|character|prompt|log"
RULES = {
    "write `is not a`, not `is no`": re.compile(
        r"(?<!there )\b(?:is|are|was|were|be) no (?!longer|more than|less than)[a-z]", re.IGNORECASE
    ),
    "write `per`, not `a`": re.compile(
        rf"\b(?:{_COUNTED}) an? (?:{_PER})\b(?! (?:is|has|was|that|of|fails))", re.IGNORECASE
    ),
    "write `ValueError if ...`, not `for what ...`": re.compile(
        r"\bfor what (?:is|has|was|cannot)\b|\bif it is none\b"
    ),
    "write `is continued`": re.compile(r"\bgone on with\b"),
}


def _broken(text: str) -> list[str]:
    """Return the rules that a text breaks, each with the words that break it."""
    return [
        f"{rule}: ... {paragraph[max(0, found.start() - 30) : found.end() + 30]} ..."
        for paragraph in (re.sub(r"\s+", " ", part) for part in re.split(r"\n\s*\n", text))
        for rule, pattern in RULES.items()
        for found in pattern.finditer(paragraph)
    ]


def _prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the strings and comments of a Python file, with their lines."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_is_in_plain_english(guide: str) -> None:
    assert _broken((ROOT / guide).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("place", CODE)
def test_docstrings_messages_and_comments_are_in_plain_english(place: str) -> None:
    path = ROOT / place
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    assert files
    broken = [f"{file.name}:{line}: {what}" for file in files for line, text in _prose(file) for what in _broken(text)]
    assert broken == []


@pytest.mark.parametrize(
    "dialect",
    [
        "a line that is no event",
        "`text` is no consumer",
        "one row a group",
        "it is read once a step",
        "tokens a second",
        "ConfigError for what is no model",
        "ConfigError if it is none",
        "a log is gone on with",
    ],
)
def test_the_dialect_is_found(dialect: str) -> None:
    assert _broken(f"Before. {dialect}, and after.")


@pytest.mark.parametrize(
    "plain", ["one row per group", "it is not an event", "there is no log", "it is no longer valid"]
)
def test_plain_english_passes(plain: str) -> None:
    assert _broken(plain) == []
