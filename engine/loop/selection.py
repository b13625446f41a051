"""Which samples of a batch are trained, by tags alone: advantages, masks and withheld tokens."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from asyncrl.configs import RunConfig
from asyncrl.engine.errors import AsyncRLError
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records import group as tag
from asyncrl.engine.records.fate import OVER_BUDGET, STALE
from asyncrl.engine.records.generated import count_generated, read_generated, sample_generated
from asyncrl.engine.records.spans import sample_spans, withheld_tokens
from asyncrl.engine.records.work import SampleWork
from asyncrl.filters import Judgement
from asyncrl.trainers.fan_out import over_budget
from asyncrl.trainers.loss.advantages import group_advantages


@dataclass(frozen=True, slots=True)
class Selection:
    """The samples to train, by key, and per group the masks of the others: a reason by index.

    `lengths` are tokens of prompt and response, by key. `ages` are versions, by key: those of the oldest token trained.
    `reward_sum` adds up the rewards of trained samples. `nodes` are where their rows are stored, by key, if known.
    """

    samples: Mapping[str, SampleWork]
    lengths: Mapping[str, int]
    ages: Mapping[str, int]
    masks: Mapping[int, Mapping[int, str]]
    reward_sum: float
    nodes: Mapping[str, str] = field(default_factory=dict)

    @property
    def trained_tokens(self) -> int:
        return sum(sample.response_tokens for sample in self.samples.values())

    def tokens_of(self, keys: Collection[str]) -> dict[str, int]:
        """Return the trained tokens of some keys, in the order of the selection."""
        return {key: sample.response_tokens for key, sample in self.samples.items() if key in keys}


def select(kept: Sequence[Judgement], config: RunConfig, *, trainer_version: int) -> Selection:
    """Choose the samples to train; AsyncRLError if one is over the budget and `trainer.over_budget` is `error`."""
    trainer = config.trainer
    samples: dict[str, SampleWork] = {}
    lengths: dict[str, int] = {}
    ages: dict[str, int] = {}
    masks: dict[int, dict[int, str]] = {}
    nodes: dict[str, str] = {}
    reward_sum = 0.0
    for judgement in kept:
        group = judgement.group
        live = [float(group.rewards[i] or 0.0) for i in judgement.live]
        found = group_advantages(live, baseline=trainer.advantage_baseline, scale=trainer.advantage_scale)
        by_index = dict(zip(judgement.live, found, strict=True))
        sizes = {group.keys[i]: group.prompt_tokens + group.response_tokens[i] for i in judgement.trained}
        skipped, oldest = _too_old(group, config, trainer_version)
        mask = masks[group.group] = {**judgement.masked, **_over_budget(judgement, sizes, config)}
        generated = sample_generated(group)
        node = group.tags.get(tag.STORED_AT)
        too_old = _generated_within(group, generated, skipped)
        mask |= {i: STALE for i in judgement.trained if i not in mask and too_old[i] >= group.trainable_tokens[i]}
        for i in judgement.trained:
            if i not in mask:
                key = group.keys[i]
                samples[key] = SampleWork(
                    key=key,
                    prompt_tokens=group.prompt_tokens,
                    response_tokens=group.trainable_tokens[i] - too_old[i],
                    advantage=by_index[i],
                    withheld=skipped[i],
                    generated=generated[i],
                )
                lengths[key] = sizes[key]
                if node is not None:
                    nodes[key] = node
                ages[key] = trainer_version - oldest[i]
                reward_sum += float(group.rewards[i] or 0.0)
    return Selection(samples, lengths, ages, masks, reward_sum, nodes)


def _generated_within(group: GroupMeta, generated: Sequence[str], skipped: Sequence[int]) -> list[int]:
    """Return, per sample, how many of the leading tokens that are skipped were generated."""
    return [
        count_generated(read_generated(text, length), 0, skip)
        for text, length, skip in zip(generated, group.response_tokens, skipped, strict=True)
    ]


def _over_budget(judgement: Judgement, sizes: Mapping[str, int], config: RunConfig) -> dict[int, str]:
    """Return masks for samples longer than a micro-batch; AsyncRLError, naming one, if they must not be masked."""
    budget = config.trainer.micro_batch_tokens
    too_long = over_budget(sizes, budget, align=config.trainer.align)
    if too_long and config.trainer.over_budget == "error":
        raise AsyncRLError(
            f"{too_long[0]} has {sizes[too_long[0]]} tokens, over trainer.micro_batch_tokens "
            f"{budget}{f' in multiples of trainer.align {config.trainer.align}' if config.trainer.align > 1 else ''}; "
            "raise it, or set trainer.over_budget to mask"
        )
    return {i: OVER_BUDGET for i in judgement.trained if judgement.group.keys[i] in too_long}


def _too_old(group: GroupMeta, config: RunConfig, trainer_version: int) -> tuple[list[int], list[int]]:
    """Return, per sample, how many leading tokens are over the bound, and the version of the oldest token left.

    In mode `tokens` each token has its own age. In the other modes a sample has the age of its group's stamp, and the
    front end has dropped the groups that are over the bound.
    """
    oldest_allowed = trainer_version - config.rollout.max_staleness
    if group.version >= oldest_allowed and config.rollout.stale_mode != "tokens":
        return [0] * group.size, [group.version] * group.size
    skipped = withheld_tokens(group, oldest_allowed)
    oldest = [
        min((version for version, _, _ in spans if version >= oldest_allowed), default=group.version)
        for spans in sample_spans(group)
    ]
    return skipped, oldest
