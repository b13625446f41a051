"""One training step: select, measure, plan, train, settle. Metadata only; tensors stay with the ranks.

Invariant: every sample of a batch that reaches a step has its fate when the step has ended.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import anyio

from asyncrl.configs import RunConfig
from asyncrl.engine import metrics
from asyncrl.engine.deployment import RankHandle
from asyncrl.engine.events.learning import agreement
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.progress import Progress
from asyncrl.engine.events.types import Measured, Planned, StepEnded, StepStarted, WorkGiven, written
from asyncrl.engine.loop.front_end import Batch
from asyncrl.engine.loop.groups import Groups, Settlement, drop_fates, trained_fates
from asyncrl.engine.loop.selection import Selection, select
from asyncrl.engine.loop.stages import Stages
from asyncrl.engine.loop.step_metrics import StepMetrics
from asyncrl.engine.loop.versions import Versions
from asyncrl.engine.records import Plan
from asyncrl.engine.records.gaps import LOG_RATIO_MAX, LOG_RATIO_MEAN
from asyncrl.engine.records.work import RankResult, Work
from asyncrl.filters import Chain, FilterContext, Judgement
from asyncrl.filters.statistics import RunningStatistics
from asyncrl.trainers.fan_out import Cost


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
        statistics: RunningStatistics,
        record: Callable[[int, Sequence[str]], Awaitable[None]] | None = None,
    ) -> None:
        trainer = config.trainer
        self._record = record
        self._config = config
        self._chain = chain
        self._progress = progress
        self._ranks = ranks
        self._stages = Stages(config, ranks=ranks, cost=cost, given=self._note_work)
        self._step_metrics = StepMetrics(
            cost, packed=trainer.packed, one_length=trainer.pad_to_step_length, align=trainer.align
        )
        self._groups = groups
        self._versions = versions
        self._log = log
        self._clock = clock
        self._statistics = statistics

    async def run(self, batch: Batch, *, waited_s: float, poll_hits: int) -> Any | None:
        """Train on a batch's survivors; None, and no step, if no sample of it can be trained."""
        began = self._clock()
        selection = await self._forward(batch)
        training = await self._let_go(batch.kept, selection)
        batch.trained = bool(selection.lengths)
        if not batch.trained:
            batch.masked.update(reason for masks in selection.masks.values() for reason in masks.values())
            await self._groups.settle(_settlements(training, selection))
            return None
        plan = self._stages.plan(selection)
        started, publish_lag = self._clock(), self._versions.publish_lag
        self._announce(batch, training, plan)
        if self._record is not None:
            await self._record(self._versions.trainer + 1, sorted(plan.keys))
        results = await self._stages.train(plan, selection, step=self._versions.trainer + 1)
        ages = Counter(selection.ages.values())
        figures = self._step_metrics.figures(plan, selection.lengths, results)
        loss = self._loss_metrics(results)
        version = self._versions.advance()
        agrees = agreement(version, ages, loss)
        self._log.append(
            StepEnded(
                step=version,
                version=version,
                seconds=round(self._clock() - started, 6),
                ages={str(age): n for age, n in sorted(ages.items())},
                samples=len(selection.lengths),
                tokens=selection.trained_tokens,
                reward_sum=selection.reward_sum,
                metrics={
                    **loss,
                    **figures.metrics,
                    **self._batch_metrics(batch, ages),
                    metrics.AGE_0_RATIO_ERROR: abs(agrees.ratio - 1) if agrees else 0.0,
                    metrics.FORWARD_SECONDS: round(started - began, 6),
                    metrics.PUBLISH_LAG: publish_lag,
                    metrics.POLL_HITS: poll_hits,
                    metrics.TRAINER_WAIT: round(waited_s, 6),
                },
                rank_seconds=tuple(round(seconds, 6) for seconds in figures.rank_seconds),
                predicted_seconds=tuple(round(seconds, 6) for seconds in figures.predicted_seconds),
            )
        )
        handle: Any = None

        async def send_weights() -> None:
            nonlocal handle
            handle = await self._ranks[0].weights()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._groups.settle, _settlements(training, selection))
            tasks.start_soon(send_weights)
        return handle

    async def _forward(self, batch: Batch) -> Selection:
        """Select what is trained, after the forward-only stages that the configuration asks for."""
        trainer, step = self._config.trainer, self._versions.trainer + 1
        selection = self._select(batch)
        if selection.lengths and (self._chain.needs_logprobs or trainer.decoupled):
            gaps = await self._stages.logprobs(selection, step=step, write=trainer.decoupled)
            log_ratios = written({key: list(gap) for key, gap in gaps.items()})
            self._log.append(Measured(batch=batch.index, log_ratios=log_ratios))
            if self._chain.needs_logprobs:
                await self._judge_after_logprobs(batch, gaps)
                selection = self._select(batch)
        if selection.lengths and trainer.reference_kl:
            await self._stages.reference_logprobs(selection, step=step)
        return selection

    def _select(self, batch: Batch) -> Selection:
        return select(batch.kept, self._config, trainer_version=self._versions.trainer)

    async def _judge_after_logprobs(self, batch: Batch, gaps: Mapping[str, tuple[float, float]]) -> None:
        """Have the chain's last filters judge by the log-probabilities' gaps, by key."""
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
        version = self._versions.trainer
        context = FilterContext(
            trainer_version=version, step=version, seed=self._config.run.seed, statistics=self._statistics
        )
        judged = self._chain.judge_after_logprobs(stamped, context)
        batch.kept = [judgement for judgement in judged if judgement.dropped is None]
        gone = [(j.group, j.dropped) for j in judged if j.dropped is not None]
        batch.drops.update(reason for _, reason in gone)
        settlements = [Settlement(group, drop_fates(group, reason)) for group, reason in gone]
        await self._groups.settle(settlements, release=self._chain.refill is not None)

    async def _let_go(self, kept: Sequence[Judgement], selection: Selection) -> list[Judgement]:
        """With refill a group of which nothing is trained has taken no place: it ends now. Return the others."""
        if self._chain.refill is None:
            return list(kept)
        gone = [j for j in kept if selection.lengths.keys().isdisjoint(j.group.keys)]
        await self._groups.settle(_settlements(gone, selection), release=True)
        return [judgement for judgement in kept if judgement not in gone]

    def _announce(self, batch: Batch, training: Sequence[Judgement], plan: Plan) -> None:
        step = self._versions.trainer + 1
        self._log.append(
            Planned(
                batch=batch.index,
                step=step,
                ranks=[[list(micro.keys) for micro in rank] for rank in plan.ranks],
                fillers=sum(micro.filler for rank in plan.ranks for micro in rank),
                updates=plan.updates,
            )
        )
        self._log.append(
            StepStarted(
                step=step,
                version=self._versions.trainer,
                groups=[judgement.group.group for judgement in training],
            )
        )

    def _note_work(self, works: Sequence[Work]) -> None:
        self._log.append(
            WorkGiven(
                step=works[0].step,
                stage=works[0].stage,
                parts=[work.digests for work in works],
                samples=[list(work.sample_digests().values()) for work in works],
            )
        )

    def _loss_metrics(self, results: Sequence[RankResult]) -> dict[str, float]:
        tokens = sum(result.tokens for result in results)
        return {
            metrics.LOSS: sum(result.loss for result in results),
            metrics.GRAD_NORM: results[0].grad_norm,
            metrics.RATIO_MEAN: sum(result.ratio_sum for result in results) / tokens,
            metrics.CLIPPED_FRACTION: sum(result.clipped for result in results) / tokens,
            metrics.KL_MEAN: sum(result.kl_sum for result in results) / tokens,
            metrics.WEIGHT_MEAN: sum(result.weight_sum for result in results) / tokens,
            metrics.USED_WEIGHT_MEAN: sum(result.used_weight_sum for result in results) / tokens,
            metrics.TRUNCATED_FRACTION: sum(result.truncated for result in results) / tokens,
            metrics.REFERENCE_KL_MEAN: sum(result.reference_kl_sum for result in results) / tokens,
            metrics.TOKENS: tokens,
        }

    def _batch_metrics(self, batch: Batch, ages: Mapping[int, int]) -> dict[str, float]:
        bias = self._progress.length_bias
        return {
            metrics.GROUPS_KEPT: len(batch.kept),
            metrics.GROUPS_JUDGED: len(batch.judged),
            metrics.AGE_MEAN: sum(age * n for age, n in ages.items()) / sum(ages.values()),
            metrics.AGE_MAX: max(ages),
            metrics.LENGTH_RATIO: bias.ratio or 0.0,
            metrics.RECENT_LENGTH_RATIO: bias.recent_ratio or 0.0,
            metrics.LENGTH_BIAS_WARNING: float(bias.warns(self._config.rollout.bias_warning)),
            metrics.TOKENS_LOST_TO_AGE: bias.lost_tokens,
            metrics.PROMPTS_LOST_HALF: bias.prompts.mostly_lost,
            metrics.RUN_AHEAD: self._groups.run_ahead.used,
            **self._progress.alarms.metrics(),
            **self._chain.metrics(),
        }


def _settlements(judgements: Sequence[Judgement], selection: Selection) -> list[Settlement]:
    out = []
    for judgement in judgements:
        masks = selection.masks[judgement.group.group]
        trained = [i for i in judgement.trained if i not in masks]
        out.append(Settlement(judgement.group, trained_fates(judgement.group, trained, masks)))
    return out
