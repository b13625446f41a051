"""One training step on the ranks: measure, plan, train. Metadata only; tensors stay with the ranks.

Invariant: what is planned is trained, token by token, or the step is an error.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import reduce

from asyncrl.configs import RunConfig
from asyncrl.engine import metrics
from asyncrl.engine.deployment import Deployment
from asyncrl.engine.events.learning import agreement
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.types import Measured, Planned, RanksPlaced, StepEnded, StepStarted, WorkGiven, written
from asyncrl.engine.loop.selection import Selection
from asyncrl.engine.loop.stages import Stages
from asyncrl.engine.loop.step_metrics import StepMetrics, loss_metrics, traffic_metrics
from asyncrl.engine.records import Plan
from asyncrl.engine.records.traffic import Traffic
from asyncrl.engine.records.work import Work

Gaps = Mapping[str, tuple[float, float]]
"""By key, the gap between the log-probabilities of trainer and sampler: largest, mean (records/gaps.py)."""


class Step:
    """Runs selections through the ranks, and logs what they were given and how it went."""

    def __init__(self, config: RunConfig, deployment: Deployment, *, log: EventLog, clock: Callable[[], float]) -> None:
        trainer = config.trainer
        self._record = deployment.record
        self._stages = Stages(config, ranks=deployment.ranks, cost=deployment.cost, given=self._note_work)
        self._metrics = StepMetrics(
            deployment.cost, packed=trainer.packs, one_length=trainer.pad_to_step_length, align=trainer.align
        )
        self._decoupled = trainer.decoupled
        self._log = log
        self._clock = clock

    def place_ranks(self, nodes: Sequence[str]) -> None:
        """Note the node of each rank."""
        self._log.append(RanksPlaced(nodes=list(nodes)))
        self._stages.place_ranks(nodes)

    async def measure(self, selection: Selection, *, batch: int, step: int) -> Gaps:
        """Have the ranks compute log-probabilities under the current weights, for filters and a decoupled objective."""
        gaps = await self._stages.logprobs(selection, step=step, write=self._decoupled)
        self._log.append(Measured(batch=batch, log_ratios=written({key: list(gap) for key, gap in gaps.items()})))
        return gaps

    async def measure_reference(self, selection: Selection, *, step: int) -> None:
        """Have the ranks compute log-probabilities under the frozen reference model."""
        await self._stages.reference_logprobs(selection, step=step)

    async def train(
        self, selection: Selection, *, batch: int, step: int, groups: Sequence[int], put: Callable[[], Traffic]
    ) -> StepEnded:
        """Plan a selection and train on it. Return the event of the step's end, without the metrics of its batch.

        `put` tells, at its end, what the collectors put since the last one.
        """
        started = self._clock()
        plan = self._stages.plan(selection)
        self._announce(plan, batch=batch, step=step, groups=groups)
        if self._record is not None:
            await self._record(step, sorted(plan.keys))
        results = await self._stages.train(plan, selection, step=step)
        figures = self._metrics.figures(plan, selection.lengths, results)
        traffic = reduce(Traffic.plus, [result.traffic for result in results], put())
        loss = loss_metrics(results)
        ages = Counter(selection.ages.values())
        agrees = agreement(step, selection.trained_tokens, ages, loss)
        return StepEnded(
            step=step,
            version=step,
            seconds=round(self._clock() - started, 6),
            ages={str(age): n for age, n in sorted(ages.items())},
            samples=len(selection.lengths),
            tokens=selection.trained_tokens,
            reward_sum=selection.reward_sum,
            metrics={
                **loss,
                **figures.metrics,
                **traffic_metrics(traffic),
                metrics.AGE_MEAN: sum(age * n for age, n in ages.items()) / ages.total(),
                metrics.AGE_MAX: max(ages),
                metrics.AGE_0_RATIO_ERROR: abs(agrees.ratio - 1) if agrees else 0.0,
            },
            rank_seconds=tuple(round(seconds, 6) for seconds in figures.rank_seconds),
            predicted_seconds=tuple(round(seconds, 6) for seconds in figures.predicted_seconds),
        )

    def _announce(self, plan: Plan, *, batch: int, step: int, groups: Sequence[int]) -> None:
        self._log.append(
            Planned(
                batch=batch,
                step=step,
                ranks=[[list(micro.keys) for micro in rank] for rank in plan.ranks],
                fillers=len(plan.filler_places),
                updates=plan.updates,
                filler_places=plan.filler_places,
            )
        )
        self._log.append(StepStarted(step=step, version=step - 1, groups=list(groups)))

    def _note_work(self, works: Sequence[Work]) -> None:
        self._log.append(
            WorkGiven(
                step=works[0].step,
                stage=works[0].stage,
                parts=[work.digests for work in works],
                samples=[list(work.sample_digests().values()) for work in works],
            )
        )
