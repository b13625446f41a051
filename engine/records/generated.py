"""Which tokens of a response the model generated; the others were put between them: feedback, or a tool's output.

They travel as the per-sample tag `generated`: places [first, end) in the response, as in `0:12,20:31`. The tokens at
12 to 19 and from 31 on are only context: they are never trained on, and their log-probability is written as 0.
Without the tag, or with an empty text, all tokens were generated.
"""

from collections.abc import Sequence

from asyncrl.engine.records.group import GroupMeta

GENERATED = "generated"

Places = tuple[tuple[int, int], ...]


def write_generated(places: Sequence[tuple[int, int]]) -> str:
    """Return places as text: (0, 12), (20, 31) is `0:12,20:31`. Without a place it is `0:0`: nothing was generated."""
    return ",".join(f"{first}:{end}" for first, end in places) or "0:0"


def read_generated(text: str, tokens: int) -> Places:
    """Read the text of `write_generated` for a response of `tokens` tokens; ValueError if it does not fit them."""
    if not text:
        return ((0, tokens),)
    places = tuple((int(first), int(end)) for first, _, end in (part.partition(":") for part in text.split(",")))
    at = 0
    for first, end in places:
        if not at <= first <= end <= tokens:
            raise ValueError(f"generated is {text!r}; it must be rising places first:end within {tokens} tokens")
        at = end
    return places


def count_generated(places: Places, first: int, end: int) -> int:
    """Return how many tokens of [first, end) were generated: of `0:12,20:31`, 13 in [10, 33)."""
    return sum(max(0, min(end, there) - max(first, here)) for here, there in places)


def sample_generated(group: GroupMeta) -> list[str]:
    """Return the text per sample, empty where all tokens were generated."""
    return list(group.sample_tag(GENERATED)) if GENERATED in group.tags else [""] * group.size
