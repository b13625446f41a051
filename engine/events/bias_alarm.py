"""Warns once, during a run, that age lets through mostly short answers.

This fold must come after the one that measures. The warning is apart from it, so that reading a log again is silent.
"""

from collections.abc import Callable
from typing import Any

from asyncrl.engine.events.length_bias import WINDOW_GROUPS, LengthBias
from asyncrl.engine.events.types import AnyEvent, BatchJudged


class BiasAlarm:
    """Calls `warn(message, **figures)` at the first batch after which `bias` warns of a ratio under `below`."""

    kinds = (BatchJudged,)

    def __init__(self, bias: LengthBias, *, below: float, warn: Callable[..., Any]) -> None:
        self._bias = bias
        self._below = below
        self._warn = warn
        self.raised = False

    def apply(self, event: AnyEvent) -> None:
        if self.raised or not isinstance(event, BatchJudged) or not self._bias.warns(self._below):
            return
        self.raised = True
        self._warn(
            "age lets through mostly short answers; see rollout.stale_mode",
            batch=event.batch,
            recent_ratio=self._bias.recent_ratio,
            bias_warning=self._below,
            of_last_groups=WINDOW_GROUPS,
            cancelled_groups=self._bias.cancelled_groups,
            prompts_mostly_lost=self._bias.prompts.mostly_lost,
        )
