"""What the controller sends to a collector: a prompt, and the order to generate a group of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a task. `id` is the same in all epochs and retries; the integer 1 and the string "1" differ.

    `fields` are the other columns of its record, JSON values by name, for the reward; the event log holds none of them.
    """

    id: int | str
    text: str
    answer: str = ""
    dataset: str = "default"
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)


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
