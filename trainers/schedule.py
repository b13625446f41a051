"""The learning rate over a run: warmed up, then constant or falling."""

import math
from dataclasses import dataclass

from asyncrl.configs import RunConfig


@dataclass(frozen=True, slots=True)
class Schedule:
    """What the learning rate of step s (from 1) is multiplied by.

    It rises by 1 / `warm_up_steps` per step to 1, then stays (`kind` constant) or falls, linearly or by a half cosine
    (SGDR, arXiv 1608.03983, eq. 5, without restarts), so that it would be 0 in the step after `total_steps`. Later
    steps keep the last value. Linear, 2 and 5: 1/2, 1, 3/4, 1/2, 1/4.
    """

    kind: str = "constant"
    warm_up_steps: int = 0
    total_steps: int | None = None

    @classmethod
    def of(cls, config: RunConfig) -> "Schedule":
        """Take what a run's configuration says."""
        trainer = config.trainer
        return cls(trainer.lr_schedule, trainer.lr_warm_up_steps, trainer.lr_total_steps or config.run.steps)

    def factor(self, step: int) -> float:
        """Return the factor of a step."""
        if step < self.warm_up_steps:
            return step / self.warm_up_steps
        if self.kind == "constant" or self.total_steps is None:
            return 1.0
        # Without a warm-up it is the first step that has the whole rate.
        top = max(self.warm_up_steps, 1)
        done = (min(step, self.total_steps) - top) / (self.total_steps + 1 - top)
        return 1 - done if self.kind == "linear" else (1 + math.cos(math.pi * done)) / 2
