"""Which version produced which tokens of a response.

A generator that swaps weights within a response reports spans; they travel as the per-sample tag
`spans`, written `version:first` and joined by commas, as in `3:0,5:12`: tokens 0 to 11 come from
version 3, the rest from 5. Without the tag all tokens have the group's version. Tokens that were not generated have
the version of the token before them, or, at the beginning, of the first that was generated.
"""

from collections.abc import Sequence

from asyncrl.engine.records.generated import GENERATED, count_generated, read_generated, sample_generated
from asyncrl.engine.records.group import GroupMeta

SPANS = "spans"


def write_spans(spans: Sequence[tuple[int, int, int]]) -> str:
    """Return (version, first, end) spans, which tile a response, as text: (3, 0, 5), (5, 5, 9) is `3:0,5:5`."""
    return ",".join(f"{version}:{first}" for version, first, _ in spans)


def read_spans(text: str, tokens: int) -> list[tuple[int, int, int]]:
    """Read the text of `write_spans` for a response of `tokens` tokens; a response without tokens has no spans."""
    starts = [tuple(map(int, part.split(":"))) for part in text.split(",") if part]
    ends = [*(first for _, first in starts[1:]), tokens][: len(starts)]
    return [(version, first, end) for (version, first), end in zip(starts, ends, strict=True)]


def sample_spans(group: GroupMeta) -> list[list[tuple[int, int, int]]]:
    """Return the spans of every sample of a group."""
    lengths = group.response_tokens
    if SPANS not in group.tags:
        return [[(group.version, 0, length)] for length in lengths]
    return [read_spans(text, n) for text, n in zip(group.sample_tag(SPANS), lengths, strict=True)]


def tokens_by_version(group: GroupMeta) -> dict[int, int]:
    """Return how many tokens of a group each version generated."""
    if SPANS not in group.tags and GENERATED not in group.tags:
        return {group.version: sum(group.response_tokens)}
    found: dict[int, int] = {}
    for spans in _generated_spans(group):
        for version, tokens in spans:
            found[version] = found.get(version, 0) + tokens
    return found


def withheld_tokens(group: GroupMeta, oldest_allowed: int) -> list[int]:
    """Return per sample how many leading tokens come from versions before `oldest_allowed`.

    Versions never go backwards within a response, so the old tokens come first. Example: of `3:0,5:12` with 20
    tokens, 12 are withheld if the oldest allowed version is 4.
    """
    return [
        sum(end - first for version, first, end in spans if version < oldest_allowed) for spans in sample_spans(group)
    ]


def mean_token_ages(group: GroupMeta, trainer_version: int) -> list[float]:
    """Return per sample the mean age of its generated tokens, in versions; 0 for a sample without any."""
    out = []
    for spans in _generated_spans(group):
        tokens = sum(count for _, count in spans)
        total = sum((trainer_version - version) * count for version, count in spans)
        out.append(total / tokens if tokens else 0.0)
    return out


def _generated_spans(group: GroupMeta) -> list[list[tuple[int, int]]]:
    """Return, for every sample, how many tokens each of its spans' versions generated."""
    out = []
    for spans, text, tokens in zip(sample_spans(group), sample_generated(group), group.response_tokens, strict=True):
        places = read_generated(text, tokens)
        out.append([(version, count_generated(places, first, end)) for version, first, end in spans])
    return out
