"""The catalogue of planted faults, and how one is planted: by function and pattern, since files move.

A record of `tests/mutations/*.toml` names a function (`engine.loop.claim_gate:passes`, by its path from the root), a
pattern, which is text that stands in that function exactly once, what replaces it, and the tests that
must notice. Whatever does not apply is an error, never passed over. Nothing here imports asyncrl.
"""

import ast
import textwrap
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CATALOGUE = ROOT / "tests" / "mutations"
_FIELDS = {"name", "function", "pattern", "replacement", "tests", "equivalent"}


class BadMutation(ValueError):
    """A record that cannot be planted; the message names it and says why."""


@dataclass(frozen=True)
class Mutation:
    """One fault. `equivalent` says why it is none after all; such a one is planted by nobody."""

    name: str
    function: str
    pattern: str
    replacement: str
    tests: tuple[str, ...]
    equivalent: str = ""

    @property
    def file(self) -> Path:
        """The file of the function, relative to the root."""
        return Path(*self.function.partition(":")[0].split(".")).with_suffix(".py")

    def planted(self, root: Path) -> str:
        """Return the text of the function's file below `root` with the fault in it; BadMutation if it does not fit."""
        file, qualname = root / self.file, self.function.partition(":")[2]
        if not file.is_file():
            raise BadMutation(f"{self.name}: there is no {self.file}")
        text = file.read_text()
        start, end = self._span(text, qualname)
        body = text[start:end]
        found = body.count(self.pattern)
        if found != 1:
            raise BadMutation(f"{self.name}: {qualname} in {self.file} has the pattern {found} times, not once")
        changed = text[:start] + body.replace(self.pattern, self.replacement) + text[end:]
        try:
            # Of the function alone: parsing whole files for each record would take seconds.
            same = _code(body.replace(self.pattern, self.replacement)) == _code(body)
        except SyntaxError as error:
            raise BadMutation(f"{self.name}: with the replacement {self.file} is no Python: {error}") from None
        if same:
            raise BadMutation(f"{self.name}: the replacement changes no code of {self.file}")
        return changed

    def _span(self, text: str, qualname: str) -> tuple[int, int]:
        """Return where the function, or class, stands in the text."""
        scope: list[ast.stmt] = _parsed(text).body
        for part in qualname.split("."):
            kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
            named = [node for node in scope if isinstance(node, kinds) and node.name == part]
            if len(named) != 1:
                raise BadMutation(f"{self.name}: {self.file} has {len(named)} of {qualname} (at {part}), not one")
            scope = named[0].body
        lines = text.splitlines(keepends=True)
        first, last = named[0].lineno - 1, named[0].end_lineno
        return len("".join(lines[:first])), len("".join(lines[:last]))


@cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def _code(function: str) -> str:
    return ast.dump(ast.parse(textwrap.dedent(function)))


def catalogue(folder: Path = CATALOGUE) -> list[Mutation]:
    """Read all records; BadMutation for one that lacks something or has another's name."""
    mutations: list[Mutation] = []
    for file in sorted(folder.glob("*.toml")):
        for record in tomllib.loads(file.read_text())["mutation"]:
            name = f"{file.stem}/{record.get('name')}"
            odd = (_FIELDS - {"equivalent"}) ^ (record.keys() - {"equivalent"})
            if odd:
                raise BadMutation(f"{name}: {sorted(odd)} missing or unknown; a record has {sorted(_FIELDS)}")
            if not record["tests"] and not record.get("equivalent"):
                raise BadMutation(f"{name}: it names no tests")
            if any(other.name == name for other in mutations):
                raise BadMutation(f"{name}: two records have this name")
            mutations.append(Mutation(**{**record, "name": name, "tests": tuple(record["tests"])}))
    if not mutations:
        raise BadMutation(f"{folder} has no mutations")
    return mutations
