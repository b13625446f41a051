"""`math_verify`: whether a response's last mathematical answer equals the record's, by the package math-verify."""

import logging
from functools import lru_cache
from typing import Any

from asyncrl.collectors.rewards.answers import expected
from asyncrl.engine.records import Prompt


class MathVerify:
    r"""1 if the answer found in the response equals the record's `field` (as `\boxed{1/2}` equals 0.5); else 0.

    A record's answer that math-verify cannot read is an error. It needs the extra `math`.
    """

    def __init__(self, field: str = "answer") -> None:
        try:
            import math_verify
        except ImportError as error:
            raise ValueError(
                f"the package math-verify cannot be imported ({error}); install it: pip install 'asyncrl[math]'"
            ) from error
        # Its own time-outs are signals, which arrive in a main thread only and would replace ours. It warns of that.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self._package: Any = math_verify
        self._field = field
        self._gold = lru_cache(maxsize=10_000)(self._parse)

    def check_prompt(self, prompt: Prompt) -> None:
        """ValueError if the prompt's record has no answer."""
        expected(prompt, self._field)

    def __call__(self, prompt: Prompt, response: str) -> float:
        answer = expected(prompt, self._field)
        gold = self._gold(answer)
        if not gold:
            raise ValueError(f"math-verify cannot read the answer {answer!r} of prompt {prompt.id!r}")
        return float(self._package.verify(gold, self._parse(response), timeout_seconds=None))

    def _parse(self, text: str) -> Any:
        return self._package.parse(text, parsing_timeout=None)
