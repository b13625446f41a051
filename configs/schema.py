"""The configuration: frozen sections, each in a file of its own. What must hold between them is in `rules`.

No field of a section has a default: `presets/default.yaml` is the one source of defaults.
"""

from typing import Annotated, Any

from pydantic import model_validator

from asyncrl.configs.rules import RULES
from asyncrl.configs.sections.cluster import Cluster
from asyncrl.configs.sections.collector import Collector
from asyncrl.configs.sections.data_plane import DataPlane
from asyncrl.configs.sections.environment import EnvironmentSection
from asyncrl.configs.sections.evaluation import Evaluation
from asyncrl.configs.sections.fields import Section, named
from asyncrl.configs.sections.lora import Lora
from asyncrl.configs.sections.model import Model
from asyncrl.configs.sections.rollout import Rollout
from asyncrl.configs.sections.run import Checkpoint, Run, Supervision
from asyncrl.configs.sections.task import Data, RewardSection, Task
from asyncrl.configs.sections.trainer import Trainer


class RunConfig(Section):
    """The whole configuration of a run."""

    run: Run
    checkpoint: Checkpoint
    model: Model
    lora: Lora
    task: Task
    data: Data
    reward: RewardSection
    environment: EnvironmentSection
    rollout: Rollout
    evaluation: Evaluation
    collector: Collector
    filters: list[Annotated[dict[str, Any], named("name", "{name: zero_std}")]]
    """The chain of filters in order: for each its name alone, or its `name` (built in, `module:Class` or
    `file.py:Class`) and its parameters."""
    trainer: Trainer
    data_plane: DataPlane
    cluster: Cluster
    supervision: Supervision

    @property
    def run_ahead_groups(self) -> int:
        """Groups that may be dispatched before their capacity comes back: with max_staleness 2 and 16 per step, 48."""
        return (self.rollout.max_staleness + 1) * self.rollout.groups_per_step

    @property
    def longest_response(self) -> int:
        """The longest response in tokens, replies of an environment included."""
        return self.rollout.max_new_tokens if self.environment.name is None else self.environment.max_tokens

    @property
    def longest_option(self) -> str:
        """The option that limits the longest response."""
        return "rollout.max_new_tokens" if self.environment.name is None else "environment.max_tokens"

    @property
    def queue_timeout_s(self) -> float:
        """Longest wait of a group for its turn to decode."""
        given = self.collector.queue_timeout_s
        return self.run_ahead_groups * self.collector.group_timeout_s if given is None else given

    @property
    def weights_folder(self) -> str:
        """Folder through which weights reach an engine outside the collector's own model."""
        return self.collector.weights_folder or "/dev/shm"

    @property
    def max_publish_lag(self) -> int:
        lag = self.rollout.max_publish_lag
        return min(1, self.rollout.max_staleness) if lag is None else lag

    @model_validator(mode="after")
    def _check(self) -> "RunConfig":
        for rule in RULES:
            rule(self)
        return self
