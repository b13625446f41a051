"""What the controller sends to a collector: a prompt, and the order to generate a group of it."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
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


class PromptStream(ABC, Iterator[Prompt]):
    """Prompts in the order in which they are first granted, epoch after epoch.

    Invariant: what comes next depends on the seed and the state alone, so that a stream that was restored goes on as
    the undisturbed one.
    """

    @property
    @abstractmethod
    def prompts(self) -> int:
        """Prompts of one epoch, those included that will be left out."""

    @property
    def skipped(self) -> Mapping[str, int]:
        """How many prompts were left out so far, by reason."""
        return {}

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the place as JSON values, for `restore`."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a place that `state` returned, also of another stream over the same prompts with the same seed."""


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
