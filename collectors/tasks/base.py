"""A task: prompts, and a reward for a response. Subclass it and name it as `module:Class`."""

import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from asyncrl.engine.records import Prompt
from asyncrl.engine.records import group as tag
from asyncrl.engine.records.gaps import LOG_RATIO_MAX, LOG_RATIO_MEAN
from asyncrl.engine.records.generated import GENERATED
from asyncrl.engine.records.spans import SPANS

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
        SPANS,
        GENERATED,
        LOG_RATIO_MAX,
        LOG_RATIO_MEAN,
    }
)


def plain_number(value: Any, *, what: str) -> float:
    """Return a number of any library as a float; TypeError if it is not a number: text, None, complex, lists.

    By type: `float("1")` is 1.0, and so is `float(numpy.str_("1"))`, where a parser of answers returned its text.
    """
    odd = isinstance(value, str | bytes | bytearray) or not hasattr(type(value), "__float__")
    # NumPy's kinds: boolean, signed, unsigned and floating; torch's dtypes have no kind.
    if odd or getattr(getattr(value, "dtype", None), "kind", "f") not in "biuf":
        raise TypeError(f"{what} is {value!r}, of type {type(value).__name__}; it must be a number")
    return float(value)


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward and its named parts; each part becomes a tag that filters can read.

    `extras` are tensors of this sample for the trainer's model, (n, …), one for each name that the task declares.
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    extras: Mapping[str, "torch.Tensor"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        value = plain_number(self.value, what="a reward")
        # Advantages travel as float32; within it, sums and squares in float64 stay finite.
        if LARGEST_REWARD < abs(value) < math.inf:
            raise ValueError(f"a reward of {value:g} is beyond the range of float32; scale it down")
        for name in self.parts:
            if not isinstance(name, str):
                kind = type(name).__name__
                raise TypeError(f"a part of a reward is called {name!r}, of type {kind}; it must be a string")
        taken = sorted(CORE_TAGS.intersection(self.parts))
        if taken:
            raise ValueError(f"a part of a reward cannot be called {taken[0]!r}: every group has a tag of that name")


class Task:
    """Prompts are listed once, before a run starts. A task without `score` is scored by `reward.functions`.

    `score` runs with the collector: on Ray in a process of its own (`collector.score_processes`), or, if it is async,
    in the collector's event loop, which it must not block.

    A `score` that raises, whatever it raises, fails its sample (cause `score_error`), and so does one that takes
    longer than `collector.score_timeout_s` (`score_timeout`); it is never reward 0.
    """

    extras: Sequence[str] = ()
    """Names of the tensors that every Reward of this task brings, as the model's forward names them."""

    def prompts(self) -> Sequence[Prompt]:
        """Return all prompts of one epoch; ids are stable and unique. Not asked where `data` has them."""
        return ()

    def evaluation_prompts(self) -> Sequence[Prompt]:
        """Return the prompts of evaluations, which `prompts` should not have. Asked once, before an evaluation."""
        return ()

    def score(self, prompt: Prompt, response: str) -> Reward | float | Awaitable[Reward | float]:
        """Reward one response (decoded, without the end token; in a run it is a Response)."""
        raise TypeError(f"{type(self).__name__} does not score; a run refuses it unless reward.functions does")

    def examples(self) -> Sequence[tuple[str, str]]:
        """Return (prompt, answer) pairs for the SFT warm-up."""
        return [(prompt.text, prompt.answer) for prompt in self.prompts()]
