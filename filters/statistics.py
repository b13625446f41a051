"""Rewards of a run so far, by prompt and by dataset, for filters that look back."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.group import is_live_reward


class Tally:
    """Number of groups, number of samples with a finite reward, and the sum of those rewards."""

    __slots__ = ("groups", "rewards", "samples")

    def __init__(self, groups: int = 0, samples: int = 0, rewards: float = 0.0) -> None:
        self.groups = groups
        self.samples = samples
        self.rewards = rewards

    @property
    def mean(self) -> float | None:
        """Mean reward; None before the first."""
        return self.rewards / self.samples if self.samples else None


class RunningStatistics:
    """Tallies of all judged groups by prompt and by dataset. A prompt that was not seen yet has no tally."""

    def __init__(self) -> None:
        self.prompts: dict[int | str, Tally] = {}
        self.datasets: dict[str, Tally] = {}

    def update(self, groups: Iterable[GroupMeta]) -> None:
        for group in groups:
            rewards = [r for r in group.rewards if r is not None and is_live_reward(r)]
            for tally in (
                self.prompts.setdefault(group.prompt, Tally()),
                self.datasets.setdefault(group.dataset, Tally()),
            ):
                tally.groups += 1
                tally.samples += len(rewards)
                tally.rewards += sum(rewards)

    # JSON keys are text: without `dumps` the prompts 1 and "1" would become one.
    def state_dict(self) -> dict[str, Any]:
        return {
            "prompts": {json.dumps(k): [t.groups, t.samples, t.rewards] for k, t in self.prompts.items()},
            "datasets": {k: [t.groups, t.samples, t.rewards] for k, t in self.datasets.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self.prompts = {json.loads(k): Tally(*v) for k, v in state["prompts"].items()}
        self.datasets = {k: Tally(*v) for k, v in state["datasets"].items()}
