"""A data-parallel trainer rank: fetches its own rows, runs its micro-batches, steps with the others.

Invariant: after every step all ranks hold equal weights, since all apply the same summed gradient.
"""

import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import anyio
import torch

from asyncrl.engine.data_plane.base import DataPlane
from asyncrl.engine.offload import Offload
from asyncrl.engine.outbox import Numbered, Outbox
from asyncrl.engine.records import MicroBatch
from asyncrl.engine.records.columns import COLUMNS, LOGPROBS, TOKENS
from asyncrl.engine.records.work import RankResult, RankWork
from asyncrl.engine.weights.base import WeightTransport
from asyncrl.trainers.backends.base import Backend, Rows, StepSums
from asyncrl.trainers.reducer import Reducer


class TrainerRank:
    """One rank. `train`, `warm_up` and `weights` are called one at a time by the driver."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        *,
        backend: Backend,
        plane: DataPlane,
        partition: str,
        reducer: Reducer,
        transport: WeightTransport,
        offload: Offload[Any],
        learning_rate: float,
        least_step_s: float = 0.0,
    ) -> None:
        self.name = f"rank{rank}"
        self._rank = rank
        self._ranks = ranks
        self._backend = backend
        self._plane = plane
        self._partition = partition
        self._reducer = reducer
        self._transport = transport
        self._offload = offload
        self._learning_rate = learning_rate
        self._least_step_s = least_step_s
        self._outbox = Outbox()

    async def train(self, work: RankWork) -> RankResult:
        """Run one step of the plan; returns sums over this rank's trained tokens."""
        sums, seconds = StepSums(), 0.0
        done_at = anyio.current_time() + self._least_step_s
        async for _, rows in self._rows(work):
            started = time.perf_counter()
            part = await self._offload(partial(self._backend.accumulate, rows, work.total_tokens))
            seconds += time.perf_counter() - started
            sums.loss += part.loss
            sums.ratio += part.ratio
            sums.clipped += part.clipped
            sums.kl += part.kl
            sums.tokens += part.tokens
        norm = await self._update(self._learning_rate)
        await anyio.sleep(max(0.0, done_at - anyio.current_time()))
        return RankResult(sums.loss, sums.ratio, sums.clipped, sums.kl, sums.tokens, norm, seconds)

    async def logprobs(self, work: RankWork) -> dict[str, tuple[float, float]]:
        """Return, by key, the largest size and the mean of log π - log π_sampler over trained tokens."""
        gaps: dict[str, tuple[float, float]] = {}
        async for batch, rows in self._rows(work):
            if batch.filler:
                continue
            ratios = await self._offload(partial(self._backend.log_ratios, rows))
            for key, ratio in zip(batch.keys, ratios, strict=True):
                gaps[key] = (float(ratio.abs().max()), float(ratio.mean())) if ratio.numel() else (0.0, 0.0)
        return gaps

    async def _rows(self, work: RankWork) -> AsyncIterator[tuple[MicroBatch, Rows]]:
        """Fetch this rank's rows in one read; yield them by micro-batch."""
        keys = list(dict.fromkeys(key for batch in work.micro_batches for key in batch.keys))
        columns = await self._plane.read(self._partition, keys, COLUMNS)
        at = {key: i for i, key in enumerate(keys)}
        for batch in work.micro_batches:
            yield (
                batch,
                Rows(
                    tokens=[columns[TOKENS][at[key]] for key in batch.keys],
                    logprobs=[columns[LOGPROBS][at[key]] for key in batch.keys],
                    prompt_tokens=[work.prompt_tokens[key] for key in batch.keys],
                    advantages=[work.advantages[key] for key in batch.keys],
                    withheld=[work.withheld[key] for key in batch.keys],
                    filler=batch.filler,
                ),
            )

    async def warm_up(
        self, examples: Sequence[tuple[list[int], int]], *, steps: int, batch: int, learning_rate: float
    ) -> float:
        """Take supervised steps on (ids, prompt tokens) pairs, in order; return the last mean loss."""
        loss = 0.0
        for step in range(steps):
            chosen = [examples[(step * batch + i) % len(examples)] for i in range(batch)]
            total = sum(len(ids) - prompt for ids, prompt in chosen)
            mine = chosen[self._rank :: self._ranks]
            part = 0.0
            if mine:
                tokens = [torch.tensor(ids) for ids, _ in mine]
                prompts = [prompt for _, prompt in mine]
                part = await self._offload(partial(self._backend.accumulate_supervised, tokens, prompts, total))
            loss = float(await self._reducer.sum(torch.tensor(part, dtype=torch.float64)))
            await self._update(learning_rate)
        self._backend.reset_optimizer()
        return loss

    async def weights(self) -> Any:
        """Return a handle on the weights as they are now."""
        return await self._offload(lambda: self._transport.send(self._backend.state()))

    async def events(self, after_seq: int, wait_s: float) -> list[Numbered]:
        """Answer the supervisor's long poll; a rank reports nothing but that it lives."""
        return await self._outbox.after(after_seq, wait_s)

    async def _update(self, learning_rate: float) -> float:
        gradients = await self._reducer.sum(await self._offload(self._backend.gradients))
        return float(await self._offload(lambda: self._backend.apply(gradients, learning_rate=learning_rate)))
