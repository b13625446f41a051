"""The outcome of scoring one response: a reward, or a failure with its cause.

Invariant: there is no reward before the task gave one. No torch here: the process that scores starts fast.
"""

import traceback
from dataclasses import dataclass, field
from typing import Any

from asyncrl.collectors.extras import check_extras
from asyncrl.collectors.question import Judge, Question
from asyncrl.collectors.tasks.base import Reward, plain_number

SCORE_ERROR = "score_error"
SCORE_TIMEOUT = "score_timeout"
BAD_LOGPROBS = "bad_logprobs"
HISTORY_MISMATCH = "history_mismatch"
UNTRAINABLE = frozenset({BAD_LOGPROBS, HISTORY_MISMATCH})
"""Causes that no stand-in reward makes up for: the sample's tokens cannot be trained on."""


@dataclass(frozen=True, slots=True)
class SampleFailure:
    """A sample that has no reward: `cause` is the reason of its fate, `error` says what happened where."""

    cause: str
    error: str


@dataclass(frozen=True, slots=True)
class StandIn(Reward):
    """The configured reward of a sample whose score failed; `cause` is the reason, as in SampleFailure."""

    cause: str = SCORE_ERROR


Outcome = Reward | SampleFailure


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds for each score of a run's task, named `task`, or of its `rewards`, of which that is `kind`.

    A score takes `timeout_s` at most; no part of a reward may have a name of `taken`, which taggers give.
    """

    task: str
    timeout_s: float = float("inf")
    taken: frozenset[str] = field(default_factory=frozenset)
    kind: str = "task"

    def late(self) -> SampleFailure:
        return SampleFailure(
            SCORE_TIMEOUT,
            f"{self.kind} {self.task}: score took longer than {self.timeout_s:g} s (collector.score_timeout_s)",
        )

    def failed(self, error: BaseException | str) -> SampleFailure:
        """Return the failure of a score that raised `error`, with the end of its traceback."""
        if isinstance(error, str):
            return SampleFailure(SCORE_ERROR, f"{self.kind} {self.task}: {error}")
        told = traceback.TracebackException.from_exception(error, limit=-5)
        # Python would put each on a line of its own, and views and the run's last words show the last line alone.
        given = told.__notes__ if isinstance(told.__notes__, list) else []
        notes, told.__notes__ = [" ".join(str(note).split()) for note in given], []
        lines = ", ".join(["".join(told.format()).rstrip(), *notes])
        return SampleFailure(SCORE_ERROR, f"{self.kind} {self.task}: score raised {error!r}\n{lines}")


def judged(judge: Judge, question: Question, rules: Rules) -> list[Outcome]:
    """Answer a question; whatever the user's code raises is the failure of its responses."""
    try:
        return outcomes_of(ask(judge, question), question, judge, rules)
    except BaseException as error:  # The edge of user code: sys.exit() in generated code too fails its sample alone.
        return all_failed(question, rules.failed(error))


def ask(judge: Any, question: Question) -> Any:
    """Return what the judge answers; an awaitable if it is async."""
    if question.rewards is None:
        return judge.score(question.prompt, question.responses[0])
    return judge.score_group(question.prompt, question.responses, question.rewards)


def outcomes_of(given: Any, question: Question, judge: Judge, rules: Rules) -> list[Outcome]:
    """Return an answer as one outcome per response; TypeError or ValueError if it is not rewards."""
    answers = [given] if question.rewards is None else given
    return [plain_reward(answer, judge, rules) for answer in answers]


def all_failed(question: Question, failure: SampleFailure) -> list[Outcome]:
    return [failure] * len(question.responses)


def plain_reward(given: Any, judge: Judge, rules: Rules) -> Reward:
    """Return a reward with plain floats, which a log can write, from any kind of number."""
    reward = given if isinstance(given, Reward) else Reward(given)
    check_extras(reward, judge.extras)
    taken = sorted(rules.taken.intersection(reward.parts))
    if taken:
        raise ValueError(
            f"a part of a reward cannot be called {taken[0]!r}: a filter's tagger gives a tag of that name"
        )
    parts = {name: plain_number(part, what=f"part {name!r} of a reward") for name, part in reward.parts.items()}
    return Reward(plain_number(reward.value, what="a reward"), parts, reward.extras)
