"""What an evaluation came to, by data set: a fold over its answered prompts.

Invariant: a sample without a reward counts neither as passed nor as failed; it is counted by itself.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from asyncrl.engine.records.estimates import Estimate, mean, pass_at_k, reported_k, share
from asyncrl.engine.records.group import TRUNCATED, is_live_reward


class Answers(Protocol):
    """The samples of one prompt: by sample a reward (None: it failed), its response's tokens, and how it ended."""

    @property
    def dataset(self) -> str: ...

    @property
    def rewards(self) -> Sequence[float | None]: ...

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def statuses(self) -> Sequence[str]: ...


@dataclass(frozen=True, slots=True)
class Scores:
    """Figures of some prompts. `pass_at` has an estimate by k, as text; `tokens` is the mean length of a response.

    `prompts` are those with a scored sample. `truncated` is the share of scored samples that were cut at the longest
    length. Of a prompt with fewer scored samples than k, pass@k does not count.
    """

    prompts: int
    samples: int
    failed_samples: int
    pass_at: Mapping[str, Estimate] = field(default_factory=dict)
    reward: Estimate | None = None
    tokens: float | None = None
    truncated: float | None = None

    @property
    def pass_at_1(self) -> float | None:
        """pass@1; None if no sample was scored."""
        found = self.pass_at.get("1")
        return None if found is None else found.value


def score(answered: Iterable[Answers], *, samples: int, pass_reward: float) -> Scores:
    """Return the figures of prompts with `samples` samples each; one passes with a reward of at least `pass_reward`."""
    rewards, tokens, truncated, failed = [], 0, 0, 0
    for answers in answered:
        live = [i for i, reward in enumerate(answers.rewards) if is_live_reward(reward)]
        failed += len(answers.rewards) - len(live)
        tokens += sum(answers.tokens[i] for i in live)
        truncated += sum(answers.statuses[i] == TRUNCATED for i in live)
        if live:
            rewards.append([answers.rewards[i] or 0.0 for i in live])
    scored = sum(map(len, rewards))
    if not scored:
        return Scores(0, 0, failed)
    passed = [(len(own), sum(reward >= pass_reward for reward in own)) for own in rewards]
    pass_at = {}
    for k in reported_k(samples):
        enough = [pass_at_k(count, good, k) for count, good in passed if count >= k]
        if enough:
            pass_at[str(k)] = share(enough, draws=sum(count for count, _ in passed if count >= k) / k)
    return Scores(
        prompts=len(rewards),
        samples=scored,
        failed_samples=failed,
        pass_at=pass_at,
        reward=mean([sum(own) / len(own) for own in rewards]),
        tokens=tokens / scored,
        truncated=truncated / scored,
    )


def score_datasets(answered: Sequence[Answers], *, samples: int, pass_reward: float) -> dict[str, Scores]:
    """Return the figures of each data set, by name."""
    names = sorted({answers.dataset for answers in answered})
    return {
        name: score([a for a in answered if a.dataset == name], samples=samples, pass_reward=pass_reward)
        for name in names
    }
