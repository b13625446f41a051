"""`exact_match`: whether a response is the answer, letter by letter."""

from asyncrl.collectors.rewards.answers import expected, last_match, pattern_of
from asyncrl.engine.records import Prompt


class ExactMatch:
    """1 if the response is the answer, without blanks around both; else 0.

    `field` of the record has the answer. Of the response, `extract` takes the last match of a regular expression (its
    first group, if it has one), and `last_line` the last line that is not blank.
    """

    def __init__(
        self, field: str = "answer", *, extract: str | None = None, last_line: bool = False, ignore_case: bool = False
    ) -> None:
        self._field = field
        self._extract = None if extract is None else pattern_of(extract, "extract")
        self._last_line = last_line
        self._ignore_case = ignore_case

    def check_prompt(self, prompt: Prompt) -> None:
        """ValueError if the prompt's record has no answer."""
        expected(prompt, self._field)

    def __call__(self, prompt: Prompt, response: str) -> float:
        given: str | None = response.strip()
        if self._last_line:
            given = response.strip().rpartition("\n")[2]
        if self._extract is not None:
            given = last_match(self._extract, given or "")
        return 0.0 if given is None else float(self._plain(given) == self._plain(expected(prompt, self._field)))

    def _plain(self, text: str) -> str:
        return text.strip().casefold() if self._ignore_case else text.strip()
