"""A task: prompts, and a reward for a response. Subclass it and name it as `module:Class`."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from asyncrl.engine.records import Prompt
from asyncrl.engine.records import group as tag

if TYPE_CHECKING:
    import torch

LARGEST_REWARD = 3.4e38

CORE_TAGS = frozenset(
    {
        tag.GROUP,
        tag.PROMPT,
        tag.DATASET,
        tag.VERSION,
        tag.END_VERSION,
        tag.PROMPT_TOKENS,
        tag.RESPONSE_TOKENS,
        tag.TRAINABLE_TOKENS,
        tag.REWARD,
        tag.STATUS,
        tag.CAUSE,
    }
)


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward and its named parts; each part becomes a tag that filters can read.

    `extras` are tensors of this sample for the trainer's model, (n, …), one for each name that the task declares.
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    extras: Mapping[str, "torch.Tensor"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Advantages travel as float32; within it, sums and squares in float64 stay finite.
        if self.value is not None and LARGEST_REWARD < abs(self.value) < math.inf:
            raise ValueError(f"a reward of {self.value:g} is beyond the range of float32; scale it down")
        taken = sorted(CORE_TAGS.intersection(self.parts))
        if taken:
            raise ValueError(f"a part of a reward cannot be called {taken[0]!r}: every group has a tag of that name")


class Task(ABC):
    """Prompts are listed in the controller; `score` runs in the collector, in a thread.

    A `score` that raises fails its sample (reason `score_error`); it is never reward 0.
    """

    extras: Sequence[str] = ()
    """Names of the tensors that every Reward of this task brings, as the model's forward names them."""

    @abstractmethod
    def prompts(self) -> Sequence[Prompt]:
        """Return all prompts of one epoch; ids are stable and unique."""

    @abstractmethod
    def score(self, prompt: Prompt, response: str) -> Reward | float:
        """Reward one response (decoded, without the end token)."""

    def examples(self) -> Sequence[tuple[str, str]]:
        """Return (prompt, answer) pairs for the supervised warm-up."""
        return [(prompt.text, prompt.answer) for prompt in self.prompts()]
