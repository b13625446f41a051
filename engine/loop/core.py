"""The life of a batch, in one class: assemble → take → train → close, and its capacity back once it is published.

    assemble   claims groups and has the chain judge them, until there is a batch (front_end.py)
    take       the trainer takes it; it will make the next version
    train      waits for the publish lag, checks age and claims again, measures, plans, trains and settles
    close      what became of it: a version to publish, or no step
    published  every generator serves that version, so the batch's capacity comes back

It has neither tasks nor sleeps. Four drivers run it: the controller in real time, replay by a log, what-if over a log's
claims, and scripts in tests. Each of the five is called once per batch, in this order.

Invariant: every sample of a batch that reaches a step has its fate when the step has ended.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import anyio
import msgspec

from asyncrl.configs import RunConfig
from asyncrl.engine import metrics
from asyncrl.engine.checkpoint.state import CoreState, GrantState
from asyncrl.engine.deployment import CONSUMER, PARTITION, Deployment
from asyncrl.engine.errors import NothingLearned
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.progress import Progress
from asyncrl.engine.events.types import BatchGivenUp, BatchTaken
from asyncrl.engine.loop.batch import Batch, TrainedBatch
from asyncrl.engine.loop.engine_uses import EngineUses
from asyncrl.engine.loop.front_end import FrontEnd, FrontEndSettings
from asyncrl.engine.loop.groups import Groups
from asyncrl.engine.loop.put_traffic import PutTraffic
from asyncrl.engine.loop.run_ahead import RunAhead
from asyncrl.engine.loop.selection import Selection, select
from asyncrl.engine.loop.settlement import Settlement, drop_fates, trained_fates
from asyncrl.engine.loop.step import Gaps, Step
from asyncrl.engine.loop.step_metrics import publish_metrics
from asyncrl.engine.loop.versions import Versions
from asyncrl.engine.records import Grant
from asyncrl.engine.records.ending import LIMIT_BATCHES, LIMIT_STEPS, REWARD_REACHED
from asyncrl.engine.records.gaps import LOG_RATIO_MAX, LOG_RATIO_MEAN
from asyncrl.filters import Chain, FilterContext, Judgement
from asyncrl.filters.statistics import RunningStatistics

HaveDevice = Callable[[], Awaitable[None]]
"""Returns once the ranks have their devices to themselves."""


async def _at_once() -> None:
    """The devices are the ranks' all the time."""


class Prompts(Protocol):
    """Where groups come from, as a batch sees it."""

    def more_may_come(self, *, in_flight: bool) -> bool:
        """Return whether another group can still arrive; `in_flight` says whether any is on its way."""

    def lost(self, grant: Grant, reason: str) -> None:
        """Note that a group got too old, or was recalled."""


class Core:
    """One run's batches. `progress` is one of the folds of `log`; `run_ahead` is in groups."""

    def __init__(
        self,
        config: RunConfig,
        deployment: Deployment,
        *,
        chain: Chain,
        log: EventLog,
        progress: Progress,
        clock: Callable[[], float],
        prompts: Prompts,
        run_ahead: int,
    ) -> None:
        self._config = config
        self._chain = chain
        self._log = log
        self._progress = progress
        self._clock = clock
        self._ranks = deployment.ranks
        self.versions = Versions(collector.name for collector in deployment.collectors)
        self.groups = Groups(
            plane=deployment.plane,
            partition=PARTITION,
            consumer=CONSUMER,
            log=log,
            run_ahead=RunAhead(run_ahead),
            on_lost=prompts.lost,
        )
        self.engine_uses = EngineUses()
        self.put_traffic = PutTraffic()
        self._judged = RunningStatistics()
        self.front_end = FrontEnd(
            FrontEndSettings.of(config, owner=deployment.owner),
            plane=deployment.plane,
            groups=self.groups,
            chain=chain,
            versions=self.versions,
            log=log,
            judged=self._judged,
            more_may_come=lambda: prompts.more_may_come(in_flight=self.groups.any_in_flight),
        )
        self._step = Step(config, deployment, log=log, clock=clock)
        self._unpublished: dict[int, Sequence[int]] = {}
        self._waits_since: float | None = None
        self._waits_for = "batch"

    @property
    def trainer_waits_for(self) -> str:
        """What the trainer is at: `batch`, `publish`, `device`, or `step` while the ranks work."""
        return self._waits_for

    @property
    def judged(self) -> RunningStatistics:
        """The running statistics of all groups judged, which filters see."""
        return self._judged

    async def assemble(self) -> Batch | None:
        """Return the next batch; None once no group can come any more, or the front end is closed."""
        if self._waits_since is None:
            self._waits_since = self._clock()
        batch = await self.front_end.next_batch()
        return None if self.front_end.closed or not batch.judged else batch

    def take(self, batch: Batch) -> None:
        """Take a batch for training: what is assembled from now on is trained one version later."""
        self.front_end.let_go(batch)
        self._log.append(BatchTaken(batch=batch.index))
        self.versions.hand_over()

    async def train(self, batch: Batch, *, have_device: HaveDevice = _at_once) -> TrainedBatch | None:
        """Train on what is left of a batch that was taken; None, and no step, if no sample of it can be trained.

        The ranks work once `have_device` has returned.
        """
        self._waits_for = "publish"
        await self._keep_publish_lag()
        await self.front_end.hand_off(batch)
        asked = self._clock()
        waited_s = asked - (asked if self._waits_since is None else self._waits_since)
        self._waits_for = "device"
        await have_device()
        self._waits_for = "step"
        began = self._clock()
        selection = await self._measure(batch)
        training = await self._let_go(batch.kept, selection)
        batch.trained = bool(selection.lengths)
        if not batch.trained:
            batch.masked.update(reason for masks in selection.masks.values() for reason in masks.values())
            await self.groups.settle(_settlements(training, selection))
            return None
        forward_s, lag, groups = self._clock() - began, self.versions.publish_lag, [j.group.group for j in training]
        ended = await self._step.train(
            selection, batch=batch.index, step=self.versions.trainer + 1, groups=groups, put=self.put_traffic.take
        )
        version = self.versions.advance()
        figures = {
            **ended.metrics,
            **self._batch_metrics(batch),
            metrics.FORWARD_SECONDS: round(forward_s, 6),
            metrics.PUBLISH_LAG: lag,
            metrics.TRAINER_WAIT: round(waited_s, 6),
            metrics.DEVICE_WAIT: round(began - asked, 6),
        }
        self._log.append(msgspec.structs.replace(ended, metrics=figures))
        return TrainedBatch(version, await self._settle_and_send(_settlements(training, selection)), batch.judged)

    def close(self, batch: Batch, trained: TrainedBatch | None) -> None:
        """Note what became of a batch. NothingLearned after `run.max_empty_batches` in a row without a step."""
        self._waits_for, self._waits_since = "batch", self._clock()
        self.front_end.let_go(batch)
        if trained is not None:
            self._unpublished[trained.version] = trained.groups
            return
        if batch.taken:
            self._log.append(BatchGivenUp(batch=batch.index))
            self.versions.give_up()
        self.groups.release(batch.judged)
        self._check_learning()

    async def run(self, batch: Batch) -> TrainedBatch | None:
        """Take, train and close a batch. A batch without a kept group is only closed."""
        trained = None
        if batch.kept:
            self.take(batch)
            trained = await self.train(batch)
        self.close(batch, trained)
        return trained

    def published(self, version: int) -> None:
        """Give back the capacity of the batches that made the versions up to one that every generator serves now."""
        self.versions.published_to_nobody(version)
        for made in sorted(self._unpublished):
            if made <= version:
                self.groups.release(self._unpublished.pop(made))

    def state(self) -> CoreState:
        """Return what is known between the close of a batch and the take of the next one, for `restore`."""
        front_end = self.front_end.state()
        return CoreState(
            version=self.versions.trainer,
            groups=self.groups.state(front_end.judged),
            out=self.groups.run_ahead.out,
            unpublished={version: list(groups) for version, groups in self._unpublished.items()},
            front_end=front_end,
            statistics=self._judged.state_dict(),
            filters=self._chain.state_dict(),
            filter_stats={name: stats.summary() for name, stats in self._chain.stats.items()},
        )

    def go_on(self, config: RunConfig, deployment: Deployment) -> None:
        """Go on in another deployment, where a log says that its run was resumed; between two batches."""
        self._config, self._ranks = config, deployment.ranks
        self._step = Step(config, deployment, log=self._log, clock=self._clock)
        self.versions.serve_by(collector.name for collector in deployment.collectors)

    def place_ranks(self, nodes: Sequence[str]) -> None:
        """Note the node of each rank, which plans prefer for what is stored there."""
        self._step.place_ranks(nodes)

    def restore(self, state: CoreState, grant: Callable[[GrantState], Grant], *, fence: int) -> None:
        """Go on from a checkpoint, whose groups are in the data plane again; those claimed, under `fence`."""
        self.versions.restore(state.version)
        self._judged.load_state_dict(state.statistics)
        self._chain.load_state_dict(state.filters)
        for name, stats in self._chain.stats.items():
            stats.restore(state.filter_stats[name])
        self._unpublished.update(state.unpublished)
        claimed = {group.grant.group: group.meta for group in state.groups if group.place == "claimed"}
        self.front_end.restore(state.front_end, claimed)
        self.groups.restore(state.groups, grant, fence=fence, out=state.out)
        # A group that was dropped just before the cut may have had its fate and still its capacity.
        out = {group.grant.group for group in state.groups}.union(*state.unpublished.values())
        if self._chain.refill is None and state.front_end.open is not None:
            out.update(state.front_end.open.judged)
        self.groups.release(group for group in state.out if group not in out)

    def limit(self) -> str | None:
        """Return the limit that the run has reached, if any: of steps, of batches, or of reward."""
        run, mean = self._config.run, self._progress.mean_of_last(self._config.run.reward_window)
        if run.steps is not None and self._progress.steps >= run.steps:
            return LIMIT_STEPS
        if run.stop_at_reward is not None and mean is not None and mean >= run.stop_at_reward:
            return REWARD_REACHED
        if run.batches is not None and self.front_end.batches >= run.batches:
            return LIMIT_BATCHES
        return None

    async def _keep_publish_lag(self) -> None:
        trainer, most = self._config.trainer, self._config.max_publish_lag
        await self.versions.changed.wait_for(
            lambda: self.versions.publish_lag <= most,
            timeout_s=trainer.publish_timeout_s * trainer.publish_tries,
            what=lambda: (
                f"publish lag over {most}, version {self.versions.published} published; "
                f"the trainer waits for {', '.join(self.versions.behind)}"
            ),
        )

    async def _measure(self, batch: Batch) -> Selection:
        """Select what is trained, after the forward-only stages that the configuration asks for."""
        trainer, step = self._config.trainer, self.versions.trainer + 1
        selection = self._select(batch)
        if selection.lengths and (self._chain.needs_logprobs or trainer.decoupled):
            gaps = await self._step.measure(selection, batch=batch.index, step=step)
            if self._chain.needs_logprobs:
                await self._judge_after_logprobs(batch, gaps)
                selection = self._select(batch)
        if selection.lengths and trainer.reference_kl:
            await self._step.measure_reference(selection, step=step)
        return selection

    def _select(self, batch: Batch) -> Selection:
        return select(batch.kept, self._config, trainer_version=self.versions.trainer)

    async def _judge_after_logprobs(self, batch: Batch, gaps: Gaps) -> None:
        """Have the filters of the last stage judge by the gaps of log-probabilities, given by key."""
        version = self.versions.trainer
        context = FilterContext(
            trainer_version=version, step=version, seed=self._config.run.seed, statistics=self._judged
        )
        judged = self._chain.judge_after_logprobs([_stamped(judgement, gaps) for judgement in batch.kept], context)
        batch.kept = judged
        gone = batch.lose({j.group.group: j.dropped for j in judged if j.dropped is not None})
        settlements = [Settlement(group, drop_fates(group, reason)) for group, reason in gone]
        await self.groups.settle(settlements, release=self._chain.refill is not None)

    async def _let_go(self, kept: Sequence[Judgement], selection: Selection) -> list[Judgement]:
        """With refill, end groups without a sample to train now: they take no place in the batch. Return the others."""
        if self._chain.refill is None:
            return list(kept)
        gone = [j for j in kept if selection.lengths.keys().isdisjoint(j.group.keys)]
        await self.groups.settle(_settlements(gone, selection), release=True)
        return [judgement for judgement in kept if judgement not in gone]

    async def _settle_and_send(self, settlements: Sequence[Settlement]) -> Any:
        """Settle what was trained, and get the new weights at the same time; return what was sent."""
        weights: Any = None

        async def send() -> None:
            nonlocal weights
            weights = await self._ranks[0].weights()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.groups.settle, settlements)
            tasks.start_soon(send)
        return weights

    def _check_learning(self) -> None:
        in_a_row, most = self._progress.alarms.learning.in_vain.batches, self._config.run.max_empty_batches
        if most is not None and in_a_row >= most:
            raise NothingLearned(
                f"{in_a_row} batches in a row had nothing to train, and run.max_empty_batches is {most}. "
                f"Of the {self._progress.alarms.in_vain()}"
            )

    def _batch_metrics(self, batch: Batch) -> Mapping[str, float]:
        bias = self._progress.length_bias
        return {
            metrics.GROUPS_KEPT: len(batch.kept),
            metrics.GROUPS_JUDGED: len(batch.judged),
            metrics.LENGTH_RATIO: bias.ratio or 0.0,
            metrics.RECENT_LENGTH_RATIO: bias.recent_ratio or 0.0,
            metrics.LENGTH_BIAS_WARNING: float(bias.warns(self._config.rollout.bias_warning)),
            metrics.TOKENS_LOST_TO_AGE: bias.lost_tokens,
            metrics.PROMPTS_LOST_HALF: bias.prompts.mostly_lost,
            metrics.RUN_AHEAD: self.groups.run_ahead.used,
            metrics.POLL_HITS: self.front_end.statistics().poll_hits,
            **publish_metrics(self._progress.last_publish),
            **self.engine_uses.take(),
            **self._progress.alarms.metrics(),
            **self._progress.reward_parts.metrics(),
            **self._progress.evaluations.metrics(),
            **self._chain.metrics(),
        }


def _stamped(judgement: Judgement, gaps: Gaps) -> Judgement:
    """Return a judgement whose group carries the gaps of its samples as tags."""
    by_sample = [gaps.get(key, (None, None)) for key in judgement.group.keys]
    tags = {LOG_RATIO_MAX: [largest for largest, _ in by_sample], LOG_RATIO_MEAN: [mean for _, mean in by_sample]}
    return replace(judgement, group=judgement.group.stamp(**tags))


def _settlements(judgements: Sequence[Judgement], selection: Selection) -> list[Settlement]:
    out = []
    for judgement in judgements:
        masks = selection.masks[judgement.group.group]
        trained = [i for i in judgement.trained if i not in masks]
        out.append(Settlement(judgement.group, trained_fates(judgement.group, trained, masks)))
    return out
