"""A batch: groups judged together, and what came of them on the way from the claim to the step."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from asyncrl.engine.checkpoint.state import BatchState, JudgementState
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.group import is_live_reward
from asyncrl.engine.weights.base import Sent
from asyncrl.filters import Judgement


@dataclass(slots=True)
class Batch:
    """A batch in the making. `judged` holds group numbers in the order of judgement, `kept` what may be trained.

    `trained` says whether the step found anything to train in it; None: not known yet. `masked` counts the samples of
    a batch with nothing to train, by reason. The reward figures are of all finite rewards judged.
    """

    index: int
    kept: list[Judgement] = field(default_factory=list)
    judged: list[int] = field(default_factory=list)
    drops: Counter[str] = field(default_factory=Counter)
    masked: Counter[str] = field(default_factory=Counter)
    trained: bool | None = None
    reward_sum: float = 0.0
    reward_count: int = 0
    partial: bool = False
    taken: bool = False
    gate_overdue: bool = False

    def judge(self, group: GroupMeta, judgement: Judgement | None, reason: str | None) -> None:
        """Note the verdict on a group: kept, or dropped for `reason`."""
        self.judged.append(group.group)
        finite = [reward for reward in group.rewards if is_live_reward(reward) and reward is not None]
        self.reward_sum += sum(finite)
        self.reward_count += len(finite)
        if reason is not None:
            self.drops[reason] += 1
        elif judgement is not None:
            self.kept.append(judgement)

    def lose(self, reasons: Mapping[int, str]) -> list[tuple[GroupMeta, str]]:
        """Remove kept groups, given by number with the reason; return them in order."""
        out = [(j.group, reasons[j.group.group]) for j in self.kept if j.group.group in reasons]
        self.kept = [j for j in self.kept if j.group.group not in reasons]
        self.drops.update(reason for _, reason in out)
        return out

    def state(self) -> BatchState:
        """Return what a checkpoint holds of a batch that is not in training."""
        kept = [
            JudgementState(j.group.group, j.by, dict(j.masked), list(j.live), list(j.trained), sorted(j.rescued))
            for j in self.kept
        ]
        return BatchState(
            index=self.index,
            judged=list(self.judged),
            kept=kept,
            drops=dict(self.drops),
            masked=dict(self.masked),
            trained=self.trained,
            reward_sum=self.reward_sum,
            reward_count=self.reward_count,
            partial=self.partial,
            gate_overdue=self.gate_overdue,
        )

    @classmethod
    def restored(cls, state: BatchState, groups: Mapping[int, GroupMeta]) -> "Batch":
        """Return the batch of a checkpoint; `groups` are those that are claimed again, by number."""
        kept = [
            Judgement(groups[k.group], None, k.by, k.masked, tuple(k.live), tuple(k.trained), frozenset(k.rescued))
            for k in state.kept
            if k.group in groups
        ]
        return cls(
            state.index,
            kept,
            list(state.judged),
            Counter(state.drops),
            Counter(state.masked),
            trained=state.trained,
            reward_sum=state.reward_sum,
            reward_count=state.reward_count,
            partial=state.partial,
            gate_overdue=state.gate_overdue,
        )

    def attempts(self, groups_per_step: int) -> int:
        """Return how many attempts its judged groups are: 5 groups at 2 per step are 3."""
        return -(-len(self.judged) // groups_per_step)


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """What a step leaves for the publisher: the new version, a handle on its weights, and the groups judged for it."""

    version: int
    weights: Sent
    groups: Sequence[int]
