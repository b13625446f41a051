"""The stages of a step on the ranks: `logprobs`, `reference_logprobs` and `train`, each with a plan of its own.

Only metadata goes out and comes back; the ranks write results as columns under the keys of the samples.
Invariant: a stage that returns has covered exactly the keys of its selection, each by one rank.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import anyio

from asyncrl.configs import RunConfig
from asyncrl.configs.sections.trainer import Trainer
from asyncrl.engine.deployment import RankHandle
from asyncrl.engine.errors import AsyncRLError, Overdue
from asyncrl.engine.loop.selection import Selection
from asyncrl.engine.records import MicroBatch, Plan
from asyncrl.engine.records.columns import REFERENCE_LOGPROBS, TRAINER_LOGPROBS
from asyncrl.engine.records.keys import row_of
from asyncrl.engine.records.work import ForwardWork, RankResult, SampleWork, TrainWork, Update, Work
from asyncrl.trainers.fan_out import Cost, plan_batch
from asyncrl.trainers.loss.normalisation import token_scales
from asyncrl.trainers.planning.nearness import Near

Answer = TypeVar("Answer")
Given = TypeVar("Given", TrainWork, ForwardWork)


class Stages:
    """Plans and runs what the ranks do for one batch. `step` is the number of the step under way.

    `given` is told of every rank's work, by rank, before it goes out.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        ranks: Sequence[RankHandle],
        cost: Cost | None,
        given: Callable[[Sequence[Work]], None] = lambda works: None,
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._cost = cost
        self._given = given
        self._nodes: Sequence[str] = ()

    def place_ranks(self, nodes: Sequence[str]) -> None:
        """Note the node of each rank: from now on plans prefer what is stored there."""
        self._nodes = nodes

    async def logprobs(self, selection: Selection, *, step: int, write: bool) -> dict[str, tuple[float, float]]:
        """Have the ranks compute log-probabilities under the current weights; with `write` they keep them as a column.

        Return, by key in the selection's order, the gap to those of the sampler (records/gaps.py: largest, mean).
        """
        gaps: dict[str, tuple[float, float]] = {}
        for part in await self._forward(selection, step=step, reference=False, write=write):
            twice = gaps.keys() & part.keys()
            if twice:
                raise AsyncRLError(f"two ranks measured {min(twice)}")
            gaps.update(part)
        if gaps.keys() != selection.lengths.keys():
            odd = min(gaps.keys() ^ selection.lengths.keys())
            raise AsyncRLError(f"the ranks measured {len(gaps)} of {len(selection.lengths)} samples; {odd} is odd")
        return {key: gaps[key] for key in selection.lengths}

    async def reference_logprobs(self, selection: Selection, *, step: int) -> None:
        """Have the ranks compute log-probabilities under the frozen reference model, and keep them as a column."""
        await self._forward(selection, step=step, reference=True, write=True)

    def plan(self, selection: Selection) -> Plan:
        """Plan training: the ranks balanced by cost; a group's samples on one rank where that costs nothing."""
        trainer = self._config.trainer
        return plan_batch(
            selection.lengths,
            ranks=len(self._ranks),
            budget_tokens=trainer.micro_batch_tokens,
            cost=self._cost,
            groups=_groups(selection),
            updates=trainer.updates_per_batch,
            align=trainer.align,
            balance=trainer.balance,
            order=trainer.micro_batch_order,
            near=self._near(selection),
        )

    async def train(self, plan: Plan, selection: Selection, *, step: int) -> list[RankResult]:
        """Run the plan, update by update; an error unless exactly the planned tokens were trained."""
        trainer = self._config.trainer
        scales = self._scales(plan, selection)
        samples = {
            key: one._replace(
                advantage=one.advantage * scales[key], scale=scales[key] if trainer.reference_kl else None
            )
            for key, one in selection.samples.items()
        }
        updates = tuple(Update(len(part.ranks[0]), sum(selection.tokens_of(part.keys).values())) for part in plan.parts)
        pad_to = self._pad_to(plan, selection)
        works = [
            TrainWork(
                step=step,
                micro_batches=micro_batches,
                samples=_samples_in(micro_batches, samples),
                total_tokens=selection.trained_tokens,
                pad_to=pad_to,
                updates=updates if len(updates) > 1 else (),
                columns=later_columns(trainer),
            )
            for micro_batches in plan.ranks
        ]
        results = await self._on_ranks(works, lambda rank, work: rank.train(work))
        trained, planned = sum(result.tokens for result in results), selection.trained_tokens
        if trained != planned:
            raise AsyncRLError(f"the ranks trained on {trained} tokens; the plan holds {planned}")
        return results

    def _scales(self, plan: Plan, selection: Selection) -> dict[str, float]:
        """Return by key the weight of each of its tokens, from the counts of its update over all ranks."""
        how, constant = self._config.trainer.loss_normalisation, self._config.longest_response
        scales: dict[str, float] = {}
        for part in plan.parts:
            scales.update(token_scales(selection.tokens_of(part.keys), how, constant=constant))
        return scales

    async def _forward(
        self, selection: Selection, *, step: int, reference: bool, write: bool
    ) -> list[dict[str, tuple[float, float]]]:
        """Run a forward-only stage, which has its own budget; in lockstep only if passes need those of others."""
        trainer = self._config.trainer
        plan = plan_batch(
            selection.lengths,
            ranks=len(self._ranks),
            budget_tokens=trainer.forward_budget,
            cost=self._cost,
            groups=_groups(selection),
            forward_only=not trainer.passes_together,
            align=trainer.align,
            balance=trainer.balance,
            near=self._near(selection),
        )
        pad_to = self._pad_to(plan, selection)
        works = [
            ForwardWork(
                step=step,
                micro_batches=micro_batches,
                samples=_samples_in(micro_batches, selection.samples),
                total_tokens=selection.trained_tokens,
                pad_to=pad_to,
                reference=reference,
                write=write,
            )
            for micro_batches in plan.ranks
        ]
        return await self._on_ranks(works, lambda rank, work: rank.logprobs(work))

    def _near(self, selection: Selection) -> Near | None:
        # A what-if may have another number of ranks than the log.
        if len(self._nodes) != len(self._ranks) or not selection.nodes:
            return None
        return Near(self._nodes, selection.nodes)

    def _pad_to(self, plan: Plan, selection: Selection) -> int:
        trainer = self._config.trainer
        if not trainer.pad_to_step_length:
            return 0
        return forward_length(plan, selection.lengths, packed=trainer.packs, align=trainer.align)

    async def _on_ranks(
        self, works: Sequence[Given], call: Callable[[RankHandle, Given], Awaitable[Answer]]
    ) -> list[Answer]:
        """Send every rank its part of a plan at once; return the answers by rank."""
        answers: dict[int, Answer] = {}

        async def one(index: int) -> None:
            answers[index] = await call(self._ranks[index], works[index])

        self._given(works)
        limit = self._config.trainer.step_timeout_s
        try:
            with anyio.fail_after(limit):
                async with anyio.create_task_group() as tasks:
                    for index in range(len(works)):
                        tasks.start_soon(one, index)
        except TimeoutError:
            late = ", ".join(self._ranks[i].name for i in range(len(works)) if i not in answers)
            raise Overdue(
                f"step {works[0].step} took longer than {limit:g} s (trainer.step_timeout_s); the trainer waits for "
                f"{late}"
            ) from None
        return [answers[index] for index in range(len(works))]


def later_columns(trainer: Trainer) -> tuple[str, ...]:
    """Return the columns that forward-only stages leave and training reads."""
    return (TRAINER_LOGPROBS,) * trainer.decoupled + (REFERENCE_LOGPROBS,) * (trainer.reference_kl > 0)


def forward_length(plan: Plan, lengths: Mapping[str, int], *, packed: bool, align: int = 1) -> int:
    """Return the common length of all forward passes of a plan, in positions: that of its longest row.

    A row is a sample or, if samples are packed, a whole micro-batch.
    """
    batches = [batch for rank in plan.ranks for batch in rank]
    return max(row_positions(batch, lengths, packed=packed, align=align) for batch in batches)


def row_positions(batch: MicroBatch, lengths: Mapping[str, int], *, packed: bool, align: int = 1) -> int:
    """Return the length of a micro-batch's longest row; each sample takes a multiple of `align` positions."""
    positions = [-(-lengths[key] // align) * align for key in batch.keys]
    return sum(positions) if packed else max(positions)


def _samples_in(micro_batches: Sequence[MicroBatch], samples: Mapping[str, SampleWork]) -> dict[str, SampleWork]:
    return {key: samples[key] for batch in micro_batches for key in batch.keys}


def _groups(selection: Selection) -> dict[str, str]:
    return {key: row_of(key) for key in selection.lengths}
