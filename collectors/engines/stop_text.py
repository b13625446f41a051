"""Stop strings: which token of a response completes one."""

from collections.abc import Callable, Sequence

Text = Callable[[Sequence[int]], str]
"""The text of tokens."""

_TOKENS_PER_CHARACTER = 4
"""A token is at least one byte of a character's at most four."""
_LEAD_TOKENS = 8
"""So many tokens before it, as some tokenizers read a text's first token in another way."""


def tail_tokens(stops: Sequence[str]) -> int:
    """Return how many last tokens can hold the longest stop string."""
    return _TOKENS_PER_CHARACTER * max(map(len, stops)) + _LEAD_TOKENS


def completing(text: Text, before: Sequence[int], new: Sequence[int], stops: Sequence[str]) -> int | None:
    """Return how many of the `new` tokens it takes for a stop string to appear behind `before`; None if none does."""
    if not _holds(text, [*before, *new], stops):
        return None
    return next(count for count in range(1, len(new) + 1) if _holds(text, [*before, *new[:count]], stops))


def _holds(text: Text, tokens: Sequence[int], stops: Sequence[str]) -> bool:
    found = text(tokens)
    return any(stop in found for stop in stops)
