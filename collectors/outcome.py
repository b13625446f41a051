"""The outcome of scoring one response: a reward, or a failure with its cause.

Invariant: there is no reward before the task gave one. No torch here: the process that scores starts fast.
"""

import traceback
from dataclasses import dataclass, field
from typing import Any

from asyncrl.collectors.extras import check_extras
from asyncrl.collectors.tasks.base import Reward, Task, plain_number
from asyncrl.engine.records import Prompt

SCORE_ERROR = "score_error"
SCORE_TIMEOUT = "score_timeout"
BAD_LOGPROBS = "bad_logprobs"


@dataclass(frozen=True, slots=True)
class SampleFailure:
    """A sample that has no reward: `cause` is the reason of its fate, `error` says what happened where."""

    cause: str
    error: str


Outcome = Reward | SampleFailure


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds for each score of a run's task, named `task`.

    A score takes `timeout_s` at most; no part of a reward may have a name of `taken`, which taggers give.
    """

    task: str
    timeout_s: float = float("inf")
    taken: frozenset[str] = field(default_factory=frozenset)

    def late(self) -> SampleFailure:
        return SampleFailure(
            SCORE_TIMEOUT, f"task {self.task}: score took longer than {self.timeout_s:g} s (collector.score_timeout_s)"
        )

    def failed(self, error: BaseException | str) -> SampleFailure:
        """Return the failure of a score that raised `error`, with the end of its traceback."""
        if isinstance(error, str):
            return SampleFailure(SCORE_ERROR, f"task {self.task}: {error}")
        lines = "".join(traceback.format_exception(error, limit=-5)).rstrip()
        return SampleFailure(SCORE_ERROR, f"task {self.task}: score raised {error!r}\n{lines}")


def judged(task: Task, prompt: Prompt, response: str, rules: Rules) -> Outcome:
    """Score one response; whatever the user's code raises is the sample's failure."""
    try:
        return plain_reward(task.score(prompt, response), task, rules)
    except BaseException as error:  # The edge of user code: sys.exit() in generated code too fails its sample alone.
        return rules.failed(error)


def plain_reward(given: Any, task: Task, rules: Rules) -> Reward:
    """Return a reward with plain floats, which a log can write, from any kind of number."""
    reward = given if isinstance(given, Reward) else Reward(given)
    check_extras(reward, task.extras)
    taken = sorted(rules.taken.intersection(reward.parts))
    if taken:
        raise ValueError(
            f"a part of a reward cannot be called {taken[0]!r}: a filter's tagger gives a tag of that name"
        )
    parts = {name: plain_number(part, what=f"part {name!r} of a reward") for name, part in reward.parts.items()}
    return Reward(plain_number(reward.value, what="a reward"), parts, reward.extras)
