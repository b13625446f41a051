"""One training step: advantages, plan, ranks, settlement. Metadata only; tensors stay with the ranks.

Invariant: every sample of a batch that reaches a step has its fate when the step has ended.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import anyio
import numpy as np

from asyncrl.configs import RunConfig
from asyncrl.engine import metrics
from asyncrl.engine.errors import AsyncRLError, Overdue
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.progress import Progress
from asyncrl.engine.events.types import Measured, Planned, StepEnded, StepStarted, written
from asyncrl.engine.front_end import Batch
from asyncrl.engine.groups import Groups, Settlement, drop_fates, trained_fates
from asyncrl.engine.lifecycle.base import RankHandle
from asyncrl.engine.records import GroupMeta, Plan
from asyncrl.engine.records.fate import OVER_BUDGET, STALE
from asyncrl.engine.records.gaps import LOG_RATIO_MAX, LOG_RATIO_MEAN
from asyncrl.engine.records.keys import row_of
from asyncrl.engine.records.spans import sample_spans, withheld_tokens
from asyncrl.engine.records.work import RankResult, RankWork
from asyncrl.engine.versions import Versions
from asyncrl.filters import Chain, FilterContext, Judgement
from asyncrl.trainers.advantages import group_advantages
from asyncrl.trainers.fan_out import Cost, over_budget, plan_batch
from asyncrl.trainers.normalisation import token_scales

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Selection:
    """What of a batch is trained: per key its tokens and advantage; per group the masks.

    `withheld` counts leading response tokens too old to be trained; `response_tokens` those trained;
    `ages` is of the oldest token trained.
    """

    lengths: Mapping[str, int]
    prompt_tokens: Mapping[str, int]
    response_tokens: Mapping[str, int]
    advantages: Mapping[str, float]
    withheld: Mapping[str, int]
    ages: Mapping[str, int]
    masks: Mapping[int, Mapping[int, str]]


class Step:
    """Runs batches through the ranks. `run` returns a handle on the new weights."""

    def __init__(
        self,
        *,
        config: RunConfig,
        chain: Chain,
        progress: Progress,
        ranks: Sequence[RankHandle],
        groups: Groups,
        versions: Versions,
        log: EventLog,
        cost: Cost | None,
        clock: Callable[[], float],
        record: Callable[[int, Sequence[str]], Awaitable[None]] | None = None,
    ) -> None:
        self._record = record
        self._config = config
        self._chain = chain
        self._progress = progress
        self._ranks = ranks
        self._cost = cost
        self._groups = groups
        self._versions = versions
        self._log = log
        self._clock = clock

    async def run(self, batch: Batch, *, waited_s: float, poll_hits: int) -> Any | None:
        """Train on a batch's survivors; None, and no step, if no sample of it can be trained."""
        selection = self._select(batch.kept)
        if self._chain.needs_logprobs and selection.lengths:
            await self._judge_after_logprobs(batch, selection)
            selection = self._select(batch.kept)
        if not selection.lengths:
            await self._groups.settle(self._settlements(batch, selection))
            return None
        plan = self._plan(selection)
        started, publish_lag = self._clock(), self._versions.publish_lag
        self._announce(batch, plan)
        if self._record is not None:
            await self._record(self._versions.trainer + 1, sorted(plan.keys))
        results = await self._train(plan, selection)
        ages = Counter(selection.ages.values())
        version = self._versions.advance()
        self._log.append(
            StepEnded(
                step=version,
                version=version,
                seconds=round(self._clock() - started, 6),
                ages={str(age): n for age, n in sorted(ages.items())},
                samples=len(selection.lengths),
                tokens=sum(selection.response_tokens.values()),
                reward_sum=_reward_sum(batch.kept, selection),
                metrics=self._metrics(
                    batch,
                    plan,
                    results=results,
                    ages=ages,
                    waited_s=waited_s,
                    poll_hits=poll_hits,
                    publish_lag=publish_lag,
                    planned=self._costs(plan, selection),
                ),
            )
        )
        handle: Any = None

        async def send_weights() -> None:
            nonlocal handle
            handle = await self._ranks[0].weights()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._groups.settle, self._settlements(batch, selection))
            tasks.start_soon(send_weights)
        return handle

    async def _judge_after_logprobs(self, batch: Batch, selection: Selection) -> None:
        """Have the ranks measure log-probabilities, and the chain's last filters judge by them."""
        plan = self._plan(selection)
        gaps: dict[str, tuple[float, float]] = {}
        for part in await self._on_ranks(plan, selection, lambda rank, work: rank.logprobs(work)):
            gaps.update(part)
        log_ratios = written({key: list(gap) for key, gap in gaps.items()})
        self._log.append(Measured(batch=batch.index, log_ratios=log_ratios))
        stamped = [
            replace(
                judgement,
                group=judgement.group.stamp(
                    **{
                        LOG_RATIO_MAX: [gaps[key][0] if key in gaps else None for key in judgement.group.keys],
                        LOG_RATIO_MEAN: [gaps[key][1] if key in gaps else None for key in judgement.group.keys],
                    }
                ),
            )
            for judgement in batch.kept
        ]
        context = FilterContext(
            trainer_version=self._versions.trainer, step=self._versions.trainer, seed=self._config.run.seed
        )
        judged = self._chain.judge_after_logprobs(stamped, context)
        batch.kept = [judgement for judgement in judged if judgement.dropped is None]
        gone = [(j.group, j.dropped) for j in judged if j.dropped is not None]
        batch.drops.update(reason for _, reason in gone)
        await self._groups.settle([Settlement(group, drop_fates(group, reason)) for group, reason in gone])

    def _select(self, kept: Sequence[Judgement]) -> Selection:
        trainer = self._config.trainer
        lengths: dict[str, int] = {}
        prompts: dict[str, int] = {}
        responses: dict[str, int] = {}
        advantages: dict[str, float] = {}
        withheld: dict[str, int] = {}
        ages: dict[str, int] = {}
        masks: dict[int, dict[int, str]] = {}
        for judgement in kept:
            group = judgement.group
            live = [float(group.rewards[i] or 0.0) for i in judgement.live]
            by_index = dict(
                zip(
                    judgement.live,
                    group_advantages(live, baseline=trainer.advantage_baseline, scale=trainer.advantage_scale),
                    strict=True,
                )
            )
            sizes = {group.keys[i]: group.prompt_tokens + group.response_tokens[i] for i in judgement.trained}
            too_long = over_budget(sizes, trainer.micro_batch_tokens)
            if too_long and trainer.over_budget == "error":
                raise AsyncRLError(
                    f"{too_long[0]} has {sizes[too_long[0]]} tokens, over trainer.micro_batch_tokens "
                    f"{trainer.micro_batch_tokens}; raise it, or set trainer.over_budget to mask"
                )
            masks[group.group] = {
                **judgement.masked,
                **{i: OVER_BUDGET for i in judgement.trained if group.keys[i] in too_long},
            }
            skipped, oldest = self._too_old(group)
            masks[group.group] |= {
                i: STALE
                for i in judgement.trained
                if group.keys[i] not in too_long and skipped[i] >= group.trainable_tokens[i]
            }
            for i in judgement.trained:
                key = group.keys[i]
                if i not in masks[group.group]:
                    lengths[key] = sizes[key]
                    prompts[key] = group.prompt_tokens
                    responses[key] = group.trainable_tokens[i] - skipped[i]
                    advantages[key] = by_index[i]
                    withheld[key] = skipped[i]
                    ages[key] = self._versions.trainer - oldest[i]
        scales = token_scales(responses, trainer.loss_normalisation, constant=self._config.rollout.max_new_tokens)
        scaled = {key: advantage * scales[key] for key, advantage in advantages.items()}
        return Selection(lengths, prompts, responses, scaled, withheld, ages, masks)

    def _too_old(self, group: GroupMeta) -> tuple[list[int], list[int]]:
        """Return per sample the leading tokens over the bound, and the version of the oldest one left.

        In mode `tokens` ages are of tokens; elsewhere a sample goes by its group's stamp, and nothing
        is over the bound that the front end has let through.
        """
        oldest_allowed = self._versions.trainer - self._config.rollout.max_staleness
        if group.version >= oldest_allowed and self._config.rollout.stale_mode != "tokens":
            return [0] * group.size, [group.version] * group.size
        skipped = withheld_tokens(group, oldest_allowed)
        oldest = [
            min((version for version, _, _ in spans if version >= oldest_allowed), default=group.version)
            for spans in sample_spans(group)
        ]
        return skipped, oldest

    def _plan(self, selection: Selection) -> Plan:
        """Balance the ranks by cost; a group's samples on one rank where that costs nothing."""
        return plan_batch(
            selection.lengths,
            ranks=len(self._ranks),
            budget_tokens=self._config.trainer.micro_batch_tokens,
            cost=self._cost,
            groups={key: row_of(key) for key in selection.lengths},
        )

    def _costs(self, plan: Plan, selection: Selection) -> list[float]:
        """Return what the samples of each rank cost: FLOPs where there is a cost model, else tokens."""
        out = []
        for rank in plan.ranks:
            keys = [key for micro in rank if not micro.filler for key in micro.keys]
            lengths = np.array([selection.lengths[key] for key in keys], np.int64)
            out.append(float(self._cost(lengths).sum()) if callable(self._cost) else float(lengths.sum()))
        return out

    def _announce(self, batch: Batch, plan: Plan) -> None:
        step = self._versions.trainer + 1
        self._log.append(
            Planned(
                batch=batch.index,
                step=step,
                ranks=[[list(micro.keys) for micro in rank] for rank in plan.ranks],
                fillers=sum(micro.filler for rank in plan.ranks for micro in rank),
            )
        )
        self._log.append(
            StepStarted(
                step=step,
                version=self._versions.trainer,
                groups=[judgement.group.group for judgement in batch.kept],
            )
        )

    async def _train(self, plan: Plan, selection: Selection) -> list[RankResult]:
        results = await self._on_ranks(plan, selection, lambda rank, work: rank.train(work))
        trained, planned = sum(result.tokens for result in results), sum(selection.response_tokens.values())
        if trained != planned:
            raise AsyncRLError(f"the ranks trained on {trained} tokens; the plan holds {planned}")
        return results

    async def _on_ranks(
        self, plan: Plan, selection: Selection, call: Callable[[RankHandle, RankWork], Awaitable[Answer]]
    ) -> list[Answer]:
        """Send every rank its part of a plan at once; return the answers by rank."""
        answers: dict[int, Answer] = {}

        async def one(index: int) -> None:
            keys = {key for micro in plan.ranks[index] for key in micro.keys}
            work = RankWork(
                step=self._versions.trainer + 1,
                micro_batches=plan.ranks[index],
                advantages={key: selection.advantages[key] for key in keys},
                prompt_tokens={key: selection.prompt_tokens[key] for key in keys},
                withheld={key: selection.withheld[key] for key in keys},
                total_tokens=sum(selection.response_tokens.values()),
            )
            answers[index] = await call(self._ranks[index], work)

        limit = self._config.trainer.step_timeout_s
        try:
            with anyio.fail_after(limit):
                async with anyio.create_task_group() as tasks:
                    for index in range(len(self._ranks)):
                        tasks.start_soon(one, index)
        except TimeoutError:
            raise Overdue(f"step {self._versions.trainer + 1} took longer than {limit:g} s") from None
        return [answers[index] for index in range(len(self._ranks))]

    def _settlements(self, batch: Batch, selection: Selection) -> list[Settlement]:
        out = []
        for judgement in batch.kept:
            masks = selection.masks[judgement.group.group]
            trained = [i for i in judgement.trained if i not in masks]
            out.append(Settlement(judgement.group, trained_fates(judgement.group, trained, masks)))
        return out

    def _metrics(
        self,
        batch: Batch,
        plan: Plan,
        *,
        results: Sequence[RankResult],
        ages: Mapping[int, int],
        waited_s: float,
        poll_hits: int,
        publish_lag: int,
        planned: Sequence[float],
    ) -> dict[str, float]:
        tokens = sum(result.tokens for result in results)
        samples = sum(ages.values())
        return {
            metrics.LOSS: sum(result.loss for result in results),
            metrics.GRAD_NORM: results[0].grad_norm,
            metrics.RATIO_MEAN: sum(result.ratio_sum for result in results) / tokens,
            metrics.CLIPPED_FRACTION: sum(result.clipped for result in results) / tokens,
            metrics.KL_MEAN: sum(result.kl_sum for result in results) / tokens,
            metrics.TOKENS: tokens,
            metrics.MICRO_BATCHES: sum(len(rank) for rank in plan.ranks),
            metrics.PLANNED_IMBALANCE: imbalance(planned),
            metrics.MEASURED_IMBALANCE: imbalance([result.seconds for result in results]),
            metrics.FLOPS: sum(planned) if callable(self._cost) else 0.0,
            metrics.RANKS: len(results),
            metrics.FILLER_MICRO_BATCHES: sum(micro.filler for rank in plan.ranks for micro in rank),
            metrics.GROUPS_KEPT: len(batch.kept),
            metrics.GROUPS_JUDGED: len(batch.judged),
            metrics.AGE_MEAN: sum(age * n for age, n in ages.items()) / samples,
            metrics.AGE_MAX: max(ages),
            metrics.LENGTH_RATIO: self._progress.length_bias.ratio or 0.0,
            metrics.PUBLISH_LAG: publish_lag,
            metrics.RUN_AHEAD: self._groups.run_ahead.used,
            metrics.POLL_HITS: poll_hits,
            metrics.TRAINER_WAIT: round(waited_s, 6),
        }


def imbalance(values: Sequence[float]) -> float:
    """Return the largest over the mean; 1 where there is nothing."""
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0


def _reward_sum(kept: Sequence[Judgement], selection: Selection) -> float:
    return sum(
        float(judgement.group.rewards[i] or 0.0)
        for judgement in kept
        for i in judgement.trained
        if judgement.group.keys[i] in selection.lengths
    )
