"""A trainer rank: fetches its rows, runs its micro-batches, steps with the others.

Invariant: after every update all replicas hold equal weights, because all apply the same summed gradient.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import torch

from asyncrl.engine.aio.blocking import Blocking
from asyncrl.engine.aio.outbox import Numbered, Outbox
from asyncrl.engine.data_plane.base import DataPlane
from asyncrl.engine.errors import AsyncRLError, VersionError
from asyncrl.engine.model.folder import Note
from asyncrl.engine.model.writer import ModelWriter
from asyncrl.engine.records import MicroBatch
from asyncrl.engine.records.columns import COLUMNS, LOGPROBS, REFERENCE_LOGPROBS, TOKENS, TRAINER_LOGPROBS
from asyncrl.engine.records.traffic import Traffic
from asyncrl.engine.records.work import ForwardWork, RankResult, SampleWork, TrainWork, Work
from asyncrl.engine.weights.base import Offer, Sent, WeightTransport
from asyncrl.engine.weights.digest import digest
from asyncrl.engine.weights.twins import with_twins, without_twins
from asyncrl.trainers.backends.base import Backend, DeviceSums, Rows, StepSums
from asyncrl.trainers.backends.trained import trained_tokens
from asyncrl.trainers.feed import feed
from asyncrl.trainers.fetch import Policy, Values, fetch_for
from asyncrl.trainers.parallel import Parallel
from asyncrl.trainers.rank_state.keeper import StateKeeper
from asyncrl.trainers.reducer import Reducer
from asyncrl.trainers.schedule import Schedule
from asyncrl.trainers.siblings import OnlyChild, Siblings


@dataclass(frozen=True, slots=True)
class RankSettings:
    """The number of this rank among all `ranks`, what it reads, and how it steps.

    `parallel` says which ranks hold a replica together; None: each holds one.
    `extras` are further tensor columns, which go to the backend with every micro-batch. `peak_flops` is the peak of its
    device in FLOP/s; 0 if it is not known. A step takes at least `min_step_s`. `learning_rate` is the highest, and
    `schedule` says which part of it a step has. With `reserve` the memory for holding the state is taken at the start.
    """

    rank: int
    ranks: int
    partition: str
    learning_rate: float
    min_step_s: float = 0.0
    fetch_policy: Policy = "auto"
    extras: tuple[str, ...] = ()
    peak_flops: float = 0.0
    schedule: Schedule = field(default_factory=Schedule)
    parallel: Parallel | None = None
    reserve: bool = False


class TrainerRank:
    """One rank. The driver calls its methods one at a time, but for `events`, and for `offer` and `serve`, by which it
    publishes one version after the other. Its `siblings` share replica and rows.
    """

    def __init__(
        self,
        settings: RankSettings,
        *,
        backend: Backend,
        plane: DataPlane,
        reducer: Reducer,
        transport: WeightTransport,
        blocking: Blocking[Any],
        siblings: Siblings | None = None,
        writer: ModelWriter | None = None,
    ) -> None:
        self.name = f"rank{settings.rank}"
        self._settings = settings
        self._backend = backend
        self._plane = plane
        self._traffic = plane.traffic()
        self._reducer = reducer
        self._transport = transport
        self._blocking = blocking
        self._siblings = siblings or OnlyChild()
        parallel = settings.parallel or Parallel(settings.ranks)
        self._replica, self._replicas = parallel.place(settings.rank).data, parallel.data
        self._fetch = fetch_for(settings.fetch_policy, plane, settings.partition, siblings=self._siblings)
        self._outbox = Outbox()
        self._offered: Sent | None = None
        self._writer = writer
        self._version: int | None = 0  # None: between the updates of one.
        self._held: dict[str, torch.Tensor] | None = None
        self._keeper = StateKeeper(settings.rank, settings.ranks)
        if settings.reserve:
            self._keeper.reserve(backend)
        self._updating, self._saving, self._keeping = anyio.Lock(), anyio.Lock(), anyio.Lock()

    async def train(self, work: TrainWork) -> RankResult:
        """Run the plan, update by update; returns sums over this rank's trained tokens."""
        sums, norms = StepSums(), []
        seconds = waited_s = 0.0
        done_at = anyio.current_time() + self._settings.min_step_s
        learning_rate = self._settings.learning_rate * self._settings.schedule.factor(work.step)
        micro_batches = iter(work.micro_batches)
        columns = (*COLUMNS, *work.columns, *self._settings.extras)
        async with feed(self._fetch, work.micro_batches, columns=columns) as fed:
            for number, update in enumerate(work.parts, start=1):
                computed: list[DeviceSums] = []
                for left in reversed(range(update.micro_batches)):
                    asked = time.perf_counter()
                    values = await fed.receive()
                    started = time.perf_counter()
                    rows = replace(rows_of(work, next(micro_batches), values), last=not left)
                    for found in await self._blocking(partial(self._accumulate, rows, update.tokens, computed)):
                        sums.add(found)
                    waited_s += started - asked
                    seconds += time.perf_counter() - started
                version = work.step if number == len(work.parts) else None
                norms.append(await self._update(learning_rate, version))
        await anyio.sleep(max(0.0, done_at - anyio.current_time()))
        return RankResult(
            loss=sums.loss / len(norms),
            ratio_sum=sums.ratio,
            clipped=sums.clipped,
            kl_sum=sums.kl,
            tokens=sums.tokens,
            grad_norm=sum(norms) / len(norms),
            seconds=seconds,
            waited_s=waited_s,
            weight_sum=sums.weight,
            used_weight_sum=sums.used_weight,
            truncated=sums.truncated,
            reference_kl_sum=sums.reference_kl,
            entropy_sum=sums.entropy,
            learning_rate=learning_rate,
            peak_flops=self._settings.peak_flops,
            traffic=self._new_traffic(),
        )

    def _accumulate(self, rows: Rows, total_tokens: int, computed: list[DeviceSums]) -> list[StepSums]:
        """Add a micro-batch's gradient, and its sums to those `computed`; return all of them after the last one.

        Not earlier: a GPU that is still at a micro-batch has the next one's work already.
        """
        computed.append(self._backend.accumulate(rows, total_tokens))
        return [one.read() for one in computed] if rows.last else []

    def _new_traffic(self) -> Traffic:
        before, self._traffic = self._traffic, self._plane.traffic()
        return self._traffic.minus(before)

    async def logprobs(self, work: ForwardWork) -> dict[str, tuple[float, float]]:
        """Run a forward-only stage under the policy or the frozen reference; with `work.write`, write its column.

        Return, by key, the largest absolute value and the mean of log π - log π_sampler over trained tokens. The
        reference is not compared, so nothing is returned for it.
        """
        reference = work.reference
        columns = (*((TOKENS,) if reference else COLUMNS), *self._settings.extras)
        found: dict[str, torch.Tensor] = {}
        gaps: dict[str, tuple[float, float]] = {}
        async with feed(self._fetch, work.micro_batches, columns=columns) as fed:
            for batch in work.micro_batches:
                rows = rows_of(work, batch, await fed.receive())
                logprobs = await self._blocking(partial(self._backend.logprobs, rows, reference=reference))
                if batch.filler:  # It was computed for other ranks' sake, which hold parts of this one's model.
                    continue
                found.update(zip(batch.keys, logprobs, strict=True))
                if not reference:
                    samples = [work.samples[key] for key in batch.keys]
                    gaps.update(zip(batch.keys, map(_gap, logprobs, rows.logprobs, samples), strict=True))
        if work.write:
            await self._write_back(work.column, found)
        return gaps

    async def _write_back(self, column: str, values: dict[str, torch.Tensor]) -> None:
        """Write a column by key. Of siblings only the leader writes, whoever fetched the rows."""
        if values and self._siblings.index == 0:
            await self._plane.write(self._settings.partition, column, values, writer=self.name)

    async def warm_up(
        self, examples: Sequence[tuple[list[int], int]], *, steps: int, batch: int, learning_rate: float
    ) -> float:
        """Take supervised steps on (ids, prompt tokens) pairs, in order; return the last mean loss."""
        loss = 0.0
        for step in range(steps):
            chosen = [examples[(step * batch + i) % len(examples)] for i in range(batch)]
            total = sum(len(ids) - prompt for ids, prompt in chosen)
            # A replica without an example has one of which nothing is learned: others may wait for its pass.
            mine = chosen[self._replica :: self._replicas] or [(ids, len(ids)) for ids, _ in chosen[:1]]
            tokens = [torch.tensor(ids) for ids, _ in mine]
            prompts = [prompt for _, prompt in mine]
            part = await self._blocking(partial(self._backend.accumulate_supervised, tokens, prompts, total))
            loss = float(await self._reducer.sum(torch.tensor(part, dtype=torch.float64)))
            await self._update(learning_rate, 0)
        self._backend.reset_optimizer()
        self._backend.freeze_reference()
        return loss

    async def weights(self) -> Sent:
        """Send the weights as they are now, for a publish to bring them to the collectors."""
        started = anyio.current_time()
        sent: Sent = await self._blocking(lambda: self._send(self._transport))
        return replace(sent, gather_s=anyio.current_time() - started)

    async def copy_weights(self, transport: WeightTransport) -> Sent:
        """Send the weights as they are now by a `transport` of the caller's, to whom no publish goes."""
        async with self._updating:
            self._whole_version()
            return await self._blocking(lambda: self._send(transport))  # type: ignore[no-any-return]

    async def lend_weights(self) -> None:
        """Give this rank's part of the weights to the one that gathers them, which alone sends or writes them."""
        async with self._updating:
            self._whole_version()
            await self._blocking(lambda: deque(self._backend.buckets(), maxlen=0))

    def _send(self, transport: WeightTransport) -> Sent:
        kept, twins = without_twins(self._backend.state())
        return replace(transport.send(kept), twins=twins)

    async def offer(self, sent: Sent, receivers: Sequence[str], *, again: bool = False) -> Offer:
        """Make sent weights ready for a try to publish them; those offered before are forgotten, as all have them."""
        before, self._offered = self._offered, sent
        if before is not None and before.number != sent.number:
            self._transport.forget(before)
        offer: Offer = await self._blocking(lambda: self._transport.offer(sent, receivers, again=again))
        return replace(offer, twins=sent.twins)

    async def serve(self, offer: Offer) -> None:
        """Bring an offer to receivers that meet this rank for it."""
        await self._blocking(lambda: self._transport.serve(offer))

    async def sleep(self) -> None:
        """Leave the device to others between two steps: all that is kept goes to the host's memory."""
        async with self._updating:
            await self._blocking(self._backend.sleep)

    async def wake(self) -> None:
        """Bring all that is kept back to the device."""
        async with self._updating:
            await self._blocking(self._backend.wake)

    async def digest(self) -> dict[str, int]:
        """Return sums over the current weights, by which ranks are compared."""
        return await self._blocking(self._digest)  # type: ignore[no-any-return]

    def _digest(self) -> dict[str, int]:
        return {name: one for bucket in self._backend.buckets() for name, one in digest(bucket).items()}

    async def hold_weights(self) -> int:
        """Copy the weights to this host's memory, for `save_held`, and return their version.

        It waits for a save under way. VersionError if they are between two updates of a version.
        """
        async with self._saving, self._updating:
            version = self._whole_version()
            self._held = await self._blocking(self._copied)
            return version

    def _copied(self) -> dict[str, torch.Tensor]:
        if self._writer is not None:
            self._writer.hold_adapter()
        kept, twins = without_twins(self._backend.state())
        return with_twins({name: value.to("cpu", copy=True) for name, value in kept.items()}, twins)

    async def save_held(self, folders: Sequence[str], note: Note) -> None:
        """Write the weights that are held as Hugging Face folders, beside training; NotWritten if the disk refuses."""
        async with self._saving:
            writer, held, self._held = self._writer, self._held, None
            if writer is None or held is None:
                raise AsyncRLError(f"{self.name} was asked to save, and holds no weights")
            await self._blocking(lambda: writer.write(held, [Path(folder) for folder in folders], note))

    async def hold_state(self) -> int:
        """Copy all that training continues from to this host's memory, for `save_state`; return its version.

        That is weights, moments and step counts, the frozen reference and random states. Rank 0 alone copies tensors.
        It waits for a save under way. VersionError between two updates of a version.
        """
        async with self._keeping, self._updating:
            version = self._whole_version()
            await self._blocking(partial(self._keeper.hold, self._backend, version))
            return version

    async def save_state(self, folder: str) -> None:
        """Write this rank's part of the held state into a folder, beside training; NotWritten if the disk refuses.

        What is held stays, so a save that failed can be tried again.
        """
        async with self._keeping:
            # The thread that writes outlives a cancelled call; the next hold would change what it writes.
            with anyio.CancelScope(shield=True):
                await self._blocking(partial(self._keeper.save, Path(folder)))

    async def load_state(self, folder: str) -> None:
        """Continue, bit for bit, from a state that any number of ranks saved; CheckpointBroken if it is damaged.

        A rank that was not there when it was saved keeps its random states.
        """
        async with self._keeping, self._updating:
            self._version = None  # Until all of it is restored.
            self._version = await self._blocking(partial(self._keeper.load, Path(folder), self._backend))

    def _whole_version(self) -> int:
        if self._version is None:
            raise VersionError(f"{self.name} stopped between the updates of one version; its weights are of none")
        return self._version

    async def events(self, after_seq: int, wait_s: float) -> list[Numbered]:
        """Answer the controller's long poll. A rank has nothing to report; its answer shows that it lives."""
        return await self._outbox.after(after_seq, wait_s)

    async def _update(self, learning_rate: float, version: int | None) -> float:
        """Take an optimizer update, which makes `version`; None: the version takes more of them."""
        gradients = await self._blocking(self._backend.gradients)
        if not self._backend.sums_gradients:
            gradients = await self._reducer.sum(gradients)
        async with self._updating:
            before, self._version = self._version, None
            try:
                norm = await self._blocking(lambda: self._backend.apply(gradients, learning_rate=learning_rate))
            except FloatingPointError:  # The weights were left as they are.
                self._version = before
                raise
            self._version = version
        return float(norm)


def rows_of(work: Work, batch: MicroBatch, values: Values) -> Rows:
    """Join a micro-batch's part of the work with the columns read for it; any other column is an extra."""
    known = {*COLUMNS, TRAINER_LOGPROBS, REFERENCE_LOGPROBS}
    samples = [work.samples[key] for key in batch.keys]
    return Rows(
        tokens=values[TOKENS],
        logprobs=values.get(LOGPROBS, ()),
        prompt_tokens=[sample.prompt_tokens for sample in samples],
        advantages=[sample.advantage for sample in samples],
        withheld=[sample.withheld for sample in samples],
        filler=batch.filler,
        proximal_logprobs=values.get(TRAINER_LOGPROBS),
        reference_logprobs=values.get(REFERENCE_LOGPROBS),
        scales=[sample.scale for sample in samples if sample.scale is not None] or None,
        pad_to=work.pad_to,
        extras={name: rows for name, rows in values.items() if name not in known},
        generated=[sample.generated for sample in samples] if any(sample.generated for sample in samples) else None,
    )


def _gap(logprobs: torch.Tensor, sampled: torch.Tensor, sample: SampleWork) -> tuple[float, float]:
    trained = trained_tokens(logprobs.shape[0], sample.withheld, sample.generated)
    gap = logprobs[trained] - sampled[trained].to(logprobs)
    return (float(gap.abs().max()), float(gap.mean())) if gap.numel() else (0.0, 0.0)
