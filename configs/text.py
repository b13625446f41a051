"""YAML as users write it: `1e-3` is a number, and a key that occurs twice is an error."""

import re
from typing import Any

import yaml

_EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")


# YAML 1.1 reads 010 as 8 and 1:30 as 90. Later YAML and users do not, so such numbers are refused.
_OLD_NUMBER = re.compile(r"[-+]?(0[0-7_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)$")

_DEEPEST = 100
"""Largest depth of maps and lists. Configurations have fewer than ten; some hundreds would exhaust Python's stack."""

MOST_VALUES = 10_000
"""Most values of a document, those behind an alias counted wherever it stands: ten lists, each of ten aliases of the
list before, are ten thousand million values to whoever looks at all of them."""


def _mark(event: yaml.Event) -> Any:
    return event.start_mark


class _Loader(yaml.SafeLoader):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._open: list[str | None] = []
        self._values = 0
        self._values_of: dict[str, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        if len(self._open) >= _DEEPEST:
            raise yaml.composer.ComposerError(None, None, f"more than {_DEEPEST} levels deep", _mark(event))
        if isinstance(event, yaml.AliasEvent) and event.anchor in self._open:
            raise yaml.composer.ComposerError(None, None, f"*{event.anchor} contains itself", _mark(event))
        anchor: str | None = getattr(event, "anchor", None)
        before = self._values
        alias = isinstance(event, yaml.AliasEvent)
        self._values += self._values_of.get(anchor or "", 0) if alias else 1
        if self._values > MOST_VALUES:
            raise yaml.composer.ComposerError(None, None, f"more than {MOST_VALUES:,} values", _mark(event))
        self._open.append(anchor)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._open.pop()
        if anchor and not alias:
            self._values_of[anchor] = self._values - before
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, ArithmeticError) as error:  # Such as a number of 5,000 digits.
            raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    "a map or list as a key; is it a template, {{ name }}, to be filled in?",
                    key_node.start_mark,
                )
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key_node.value!r} occurs twice", node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)

    def construct_number(self, node: yaml.ScalarNode) -> Any:
        if _OLD_NUMBER.match(node.value):
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"{node.value} is a number of base 8 or 60 in YAML 1.1; write it in decimal, or in quotes",
                node.start_mark,
            )
        read = self.construct_yaml_int if node.tag.endswith(":int") else self.construct_yaml_float
        return read(node)


for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_number)
# What JSON, and so the event log, does not know: a date stays the text that it is, the others are refused.
for _kind in ("timestamp", "binary", "set", "omap", "pairs"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_undefined)  # type: ignore[type-var]
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
# YAML 1.1, which PyYAML reads, takes 1e-3 for a string: it wants a point and a sign, 1.0e-3.
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def read_yaml(text: str) -> Any:
    """Parse one document; yaml.YAMLError, with line and column on one line, if it is not YAML."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.reader.ReaderError as error:  # It has a position alone.
        line, column = text.count("\n", 0, error.position), error.position - text.rfind("\n", 0, error.position) - 1
        raise _at(line, column, f"the character #x{error.character:02x} is not allowed") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if mark is None:
            raise
        words = ", ".join(part for part in (error.context, error.problem) if part)
        raise _at(mark.line, mark.column, words) from error


def _at(line: int, column: int, problem: str) -> yaml.YAMLError:
    return yaml.YAMLError(f"line {line + 1}, column {column + 1}: {problem}")
