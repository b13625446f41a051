"""`length`: how well a response keeps to a length."""

from typing import Literal

from asyncrl.engine.records import Prompt


class Length:
    """With `target`: max(0, 1 - |length - target| / target). With `limit`: 0 up to limit - margin, then down to -1.

    At limit it is -1, and beyond (DAPO's soft overlong punishment, arXiv:2503.14476, equation 13): limit 100 and margin
    20 give -0.5 for 90 tokens. `unit` is `tokens` or `characters`.
    """

    def __init__(
        self,
        *,
        target: int | None = None,
        limit: int | None = None,
        margin: int = 0,
        unit: Literal["tokens", "characters"] = "tokens",
    ) -> None:
        if (target is None) == (limit is None):
            raise ValueError(f"target is {target} and limit {limit}; exactly one of them must be set")
        if target is not None and (target < 1 or margin):
            raise ValueError(f"target is {target} and margin {margin}; a target is at least 1, and has no margin")
        if limit is not None and not 0 <= margin <= limit:
            raise ValueError(f"limit is {limit} and margin {margin}; it must hold that 0 <= margin <= limit")
        self._target = target
        self._limit = limit
        self._margin = margin
        self._unit = unit

    def __call__(self, prompt: Prompt, response: str) -> float:
        tokens: int | None = getattr(response, "tokens", None)
        length = len(response) if self._unit == "characters" else tokens
        if length is None:
            raise ValueError("the response does not say how many tokens it has; set unit to characters")
        if self._target is not None:
            return max(0.0, 1 - abs(length - self._target) / self._target)
        assert self._limit is not None
        over = length - (self._limit - self._margin)
        if over <= 0:
            return 0.0
        return -1.0 if length >= self._limit else -over / self._margin
