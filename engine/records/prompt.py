"""What the controller hands to a collector: prompts, and grants to generate a group."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a task. `id` is stable over epochs and retries; the integer 1 and the string "1" are two."""

    id: int | str
    text: str
    answer: str = ""
    dataset: str = "default"


@dataclass(frozen=True, slots=True)
class Grant:
    """Leave to generate one group: `size` samples of `prompt`.

    A sample's seed is a function of (`seed`, `group`, index), whoever generates it. `tries` counts the
    groups before this one that were lost to age for the same turn of the prompt.
    """

    group: int
    prompt: Prompt
    size: int
    seed: int
    tries: int = 0
