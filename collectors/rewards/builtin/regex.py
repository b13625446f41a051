"""`regex`: whether a response matches a regular expression."""

from typing import Literal

from asyncrl.collectors.rewards.answers import pattern_of
from asyncrl.engine.records import Prompt


class Regex:
    """1 if `pattern` matches the response; else 0. A dot matches line ends too; `(?i)` at its start ignores case.

    With `mode` `search` a match anywhere counts, with `fullmatch` only one of the whole response.
    """

    def __init__(self, pattern: str, *, mode: Literal["search", "fullmatch"] = "search") -> None:
        compiled = pattern_of(pattern, "pattern")
        self._match = compiled.search if mode == "search" else compiled.fullmatch

    def __call__(self, prompt: Prompt, response: str) -> float:
        return float(self._match(response) is not None)
