"""Which prompts lose their answers to age. Prompts with long answers lose them again and again.

Invariant: at most `limit` prompts are counted. Whenever there are more, half of them are dropped, chosen by a hash of
their id (adaptive sampling: Flajolet, On adaptive sampling, Computing 43, 1990). Shares among the counted prompts are
estimates for all prompts, and `sampled` is the share of prompts that are counted.
"""

import heapq
import zlib
from dataclasses import asdict, dataclass
from typing import Any

LIMIT = 65_536
_WORST = 5


@dataclass(slots=True)
class PromptTally:
    """The finished groups of one prompt, and their response tokens. A cancelled group has no tokens to count."""

    prompt: int | str
    dataset: str
    groups: int = 0
    lost_groups: int = 0
    generated_tokens: int = 0
    lost_tokens: int = 0
    trained_tokens: int = 0

    @property
    def mostly_lost(self) -> bool:
        """Whether the prompt lost more than half of its tokens or groups to age."""
        return 2 * self.lost_tokens > self.generated_tokens or 2 * self.lost_groups > self.groups


class PromptWaste:
    """Tallies of groups and tokens by prompt."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._mask = 0
        self._tallies: dict[int | str, PromptTally] = {}
        self.mostly_lost = 0

    def add(
        self, prompt: int | str, dataset: str, *, generated: int, lost: int, trained: int, lost_group: bool
    ) -> None:
        """Count a finished group, in response tokens; of a `lost_group` age let nothing through."""
        if self._mask and _hash(prompt) & self._mask:
            return
        tally = self._tallies.get(prompt)
        if tally is None:
            tally = self._tallies[prompt] = PromptTally(prompt, dataset)
        self.mostly_lost -= tally.mostly_lost
        tally.groups += 1
        tally.lost_groups += lost_group
        tally.generated_tokens += generated
        tally.lost_tokens += lost
        tally.trained_tokens += trained
        self.mostly_lost += tally.mostly_lost
        while len(self._tallies) > self._limit:
            self._halve()

    def summary(self) -> dict[str, Any]:
        """Return how many prompts were counted and mostly lost, how unevenly, and those that lost most.

        `waste_gini` is the Gini coefficient of lost tokens by prompt: 0 if all prompts lose the same, near 1 if a few
        lose almost everything, None if nothing was lost.
        """
        tallies = self._tallies.values()
        worst = heapq.nsmallest(
            _WORST, tallies, key=lambda t: (-t.lost_tokens, -t.lost_groups, isinstance(t.prompt, str), t.prompt)
        )
        return {
            "counted": len(tallies),
            "sampled": 1 / (self._mask + 1),
            "mostly_lost": self.mostly_lost,
            "all_lost": sum(tally.lost_groups == tally.groups for tally in tallies),
            "waste_gini": gini([tally.lost_tokens for tally in tallies]),
            "worst": [asdict(tally) for tally in worst if tally.lost_groups or tally.lost_tokens],
        }

    def _halve(self) -> None:
        self._mask = 2 * self._mask + 1
        self._tallies = {p: tally for p, tally in self._tallies.items() if not _hash(p) & self._mask}
        self.mostly_lost = sum(tally.mostly_lost for tally in self._tallies.values())


def gini(values: list[int]) -> float | None:
    """Return the Gini coefficient of non-negative values: half their mean difference over their mean; None if all 0.

    With sorted values numbered from 1: (2 Σ i·xᵢ / Σ xᵢ - n - 1) / n. Example: 0, 0, 0, 8 gives 0.75.
    """
    total, n = sum(values), len(values)
    if not total:
        return None
    return (2 * sum(i * value for i, value in enumerate(sorted(values), start=1)) / total - n - 1) / n


def _hash(prompt: int | str) -> int:
    return zlib.crc32(str(prompt).encode())
