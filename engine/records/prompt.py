"""What the controller sends to a collector: a prompt, and the order to generate a group of it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a task. `id` is the same in all epochs and retries; the integer 1 and the string "1" differ."""

    id: int | str
    text: str
    answer: str = ""
    dataset: str = "default"


@dataclass(frozen=True, slots=True)
class Grant:
    """The order to generate one group: `size` samples of `prompt`.

    A sample's seed depends only on (`seed`, `group`, index), not on the collector. `tries` counts the earlier groups
    that were lost to age in the same turn of the prompt.
    """

    group: int
    prompt: Prompt
    size: int
    seed: int
    tries: int = 0
