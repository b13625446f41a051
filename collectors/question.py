"""What is asked of user code that scores, and of whatever runs it.

collector ──prompt, responses──▶ Scorer ──questions──▶ Place: event loop, threads, processes ──▶ Judge
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from asyncrl.engine.records import Prompt


@dataclass(frozen=True, slots=True)
class Question:
    """Responses to be scored in one call, within one time limit.

    `rewards` are what they have so far, None for one that failed, where a whole group is asked about; without it there
    is one response, to be scored alone.
    """

    prompt: Prompt
    responses: tuple[str, ...]
    rewards: tuple[float | None, ...] | None = None


class Judge(Protocol):
    """User code that scores: a task, or the run's reward functions."""

    extras: Sequence[str]

    def score(self, prompt: Prompt, response: str) -> Any: ...


class GroupJudge(Judge, Protocol):
    """A judge that also sees whole groups: it is asked once all their responses have been scored alone."""

    def score_group(self, prompt: Prompt, responses: Sequence[str], rewards: Sequence[float | None]) -> Any: ...
