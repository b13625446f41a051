"""A model that decodes in slots: fills prompts in, and makes the next tokens of all rows, on the model's device.

Calls come one at a time, from whatever thread. On a GPU none of them waits for the device but `Burst.read`.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from asyncrl.collectors.engines.attention import MaskPlan, decode_in, use_slots
from asyncrl.collectors.engines.expert_record import ExpertRecord, Experts
from asyncrl.collectors.engines.fused import FusedModel
from asyncrl.collectors.engines.graphs import Step, StepGraphs
from asyncrl.collectors.engines.rows import Rows, Seat
from asyncrl.collectors.engines.sampler import keep, sample
from asyncrl.collectors.engines.settings import NativeSettings
from asyncrl.collectors.engines.slot_cache import Shape, ShapeProbe, SlotCache, slots_within
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.model.off_load import OffLoad

_ALIGN = 8
"""Positions: kernels take a mask as it is if its lines are a multiple of this long, and copy it per layer else."""
_PLAIN_WINDOW = 64
"""A step sees the cache up to a multiple of so many positions."""
_FIRST_GRAPH_WINDOW = 128
"""With graphs, one per window: so many positions, and then twice as many each."""
_FEWER_ROWS = 4
"""With graphs, one per number of rows: all slots, and each time so many times fewer."""


class Burst:
    """The tokens and log-probabilities of some steps (steps, rows), -1 where a row had ended; read once."""

    def __init__(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        self._event = None
        if tokens.is_cuda:
            # Copies to pinned memory run behind the steps; the host waits for them only when it reads.
            tokens = tokens.to("cpu", non_blocking=True)
            logprobs = logprobs.to("cpu", non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        self._tokens, self._logprobs = tokens, logprobs

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        """Return tokens and log-probabilities, one list per row."""
        if self._event is not None:
            self._event.synchronize()
        return self._tokens.T.tolist(), self._logprobs.T.tolist()


class Decoder:
    """`slots` sequences of at most `length` tokens; the slots in use are the first ones. `fuse` compiles a model."""

    def __init__(self, model: Any, settings: NativeSettings, *, fuse: Callable[[Any], Any] = FusedModel) -> None:
        parameter = next(model.parameters())
        self._model = model
        self._device, self._dtype = parameter.device, parameter.dtype
        known = inspect.signature(model.forward).parameters
        # transformers renames it between versions, and models differ in the order of their arguments.
        self._experts: ExpertRecord | None = None
        self._cache_keyword = "cache" if "cache" in known else "past_key_values"
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        self._masks = MaskPlan(model.config)
        self.length = -(-settings.length // _ALIGN) * _ALIGN
        own = getattr(model.config, "_attn_implementation", None)
        use_slots(model)
        try:
            shapes, cache_dtype = self._probe()
            self.token_bytes = SlotCache.token_bytes(shapes, cache_dtype)
            self.slots = slots_within(
                settings.cache_bytes, length=self.length, token_bytes=self.token_bytes, rows=settings.rows
            )
        except ConfigError:
            # A run that falls back to whole batches must find the model's own attention.
            if own is not None:
                model.set_attn_implementation(own)
            raise
        with torch.inference_mode():
            self._cache: Any = SlotCache(
                shapes, slots=self.slots, length=self.length, dtype=cache_dtype, device=self._device
            )
            self._rows = Rows(self.slots, self.length, self._device)
            self._slot_index = torch.arange(self.slots, device=self._device)
            self._columns = torch.arange(self.length, device=self._device)
            self._chosen = torch.zeros(self.slots, dtype=torch.int64, device=self._device)
            self._logprobs = torch.zeros(self.slots, device=self._device)
        decode_in(model, self._cache)
        if settings.experts:
            self._experts = ExpertRecord(model, slots=self.slots, length=self.length, device=self._device)
        # The model alone: Inductor cannot compile the sampler's sum over a large vocabulary (torch 2.11).
        self._fused = fuse(model) if settings.compiled else None
        self._graphed = settings.graphs and self._device.type == "cuda"
        self._graphs = StepGraphs(self._step, self._rows) if self._graphed else None
        self._run_step: Step = self._graphs or self._step
        self._weights = OffLoad(self._device)
        self._ends_early = self._device.type != "cuda" and not settings.ahead

    @torch.inference_mode()
    def fill(self, slots: Sequence[int], sequences: Sequence[Sequence[int]], *, record: bool = True) -> None:
        """Compute keys and values of whole sequences, each into its slot, in one pass.

        Without `record` the experts that are recorded of them stay.
        """
        longest = max(map(len, sequences))
        ids = np.zeros((len(sequences), longest), dtype=np.int64)
        for i, sequence in enumerate(sequences):
            ids[i, : len(sequence)] = sequence
        index = self._rows.send(np.array(slots))
        self._cache.fill(index)
        positions = self._columns[None, :longest].expand(len(sequences), -1)
        masks = self._masks.whole(longest, self._dtype, self._device)
        if self._experts is not None and record:
            self._experts.write_to(index, positions)
        self._forward(self._model, self._rows.send(ids), masks, positions)

    @torch.inference_mode()
    def share(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` cached positions of slots to others."""
        self._copy(self._rows.send(np.array(sources)), self._rows.send(np.array(targets)), length)

    @torch.inference_mode()
    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Have sequences go on in other slots."""
        at, to = self._rows.send(np.array(sources)), self._rows.send(np.array(targets))
        self._copy(at, to, length)
        self._rows.copy(at, to)

    @property
    def records_experts(self) -> bool:
        return self._experts is not None

    @torch.inference_mode()
    def experts(self, slot: int, tokens: int) -> Experts | None:
        """Return the experts chosen for a slot's first `tokens`; None if they are not recorded."""
        return None if self._experts is None else self._experts.read(slot, tokens)

    def close(self) -> None:
        """Have the model's routers record no more."""
        if self._experts is not None:
            self._experts.close()

    def leave(self, slots: int, length: int) -> None:
        """Move the weights to the host's memory, with what the first `slots` have cached up to `length`."""
        if self._graphs is not None:
            self._graphs.forget()
        self._cache.leave(slots, length)
        self._weights.leave([*self._model.parameters(), *self._model.buffers()])

    @torch.inference_mode()
    def come_back(self) -> None:
        """Bring the weights and the cache back to the device."""
        with torch.inference_mode(mode=False):  # A weight of inference mode could never be written to outside of it.
            self._weights.come_back()
        self._cache.come_back()

    @property
    def device_bytes(self) -> int:
        """What weights and cache take of the device now."""
        if self._weights.is_away:
            return 0
        weights: dict[int, int] = {id(weight): weight.nbytes for weight in self._model.parameters()}
        of_cache: int = self._cache.bytes
        return sum(weights.values()) + of_cache

    @torch.inference_mode()
    def seat(self, seats: Sequence[Seat]) -> None:
        """Have rows begin whose slots are filled up to their last token, which the next step takes."""
        self._rows.seat(seats)

    @torch.inference_mode()
    def burst(self, rows: int, positions: int, *, steps: int, filtered: bool) -> Burst:
        """Make up to `steps` tokens in each of the first `rows` slots, none of which comes to use over `positions`.

        `filtered` says that a row may have top-k, top-p or min-p. On a CPU it ends early when a row has ended, unless a
        burst is ahead of the one that is taken: which steps are under way must be known then.
        """
        shape = self._fewest_rows(rows), self._window(positions), filtered
        tokens = torch.empty(steps, rows, dtype=torch.int64, device=self._device)
        logprobs = torch.empty(steps, rows, device=self._device)
        opened = int(self._rows.open(rows).sum()) if self._ends_early else 0
        for step in range(steps):
            self._run_step(*shape)
            tokens[step], logprobs[step] = self._chosen[:rows], self._logprobs[:rows]
            if opened and int(self._rows.open(rows).sum()) < opened:
                return Burst(tokens[: step + 1], logprobs[: step + 1])
        return Burst(tokens, logprobs)

    def prepare(self, *, filtered: bool = False) -> None:
        """Run each shape of a step once while no row is live, so that none is captured or compiled later."""
        if not self._graphed and self._fused is None:
            return
        rows, sizes = self.slots, [self.slots]
        while self._fewest_rows(1) < rows:
            rows = -(-rows // _FEWER_ROWS)
            sizes.append(rows)
        windows = dict.fromkeys(self._window(positions) for positions in range(1, self.length + 1))
        with torch.inference_mode():
            for size in sizes:
                for window in windows:
                    self._run_step(size, window, filtered)

    def _step(self, rows: int, window: int, filtered: bool) -> None:
        state = self._rows
        positions = state.positions(rows)
        self._cache.decode(self._slot_index[:rows], positions, window)
        if self._experts is not None:
            self._experts.write_to(self._slot_index[:rows], positions[:, None])
        # A compiled program takes one shape: attention leaves out what the window does.
        columns = self._columns[:window] if self._fused is None else self._columns
        masks = self._masks.token(positions, columns, self._dtype)
        logits = self._forward(self._fused or self._model, state.tokens(rows)[:, None], masks, positions[:, None])
        temperature = state.temperature(rows)
        kept = keep(logits, temperature, *state.limits(rows)) if filtered else None
        chosen, logprobs = sample(logits, state.draws(rows), temperature, kept)
        self._chosen[:rows] = state.advance(chosen)
        self._logprobs[:rows] = logprobs

    def _copy(self, sources: torch.Tensor, targets: torch.Tensor, length: int) -> None:
        self._cache.copy(sources, targets, length)
        if self._experts is not None:
            self._experts.copy(sources, targets, length)

    def _forward(self, model: Any, ids: torch.Tensor, masks: Any, positions: torch.Tensor) -> torch.Tensor:
        out = model(
            input_ids=ids,
            attention_mask=masks,
            position_ids=positions,
            use_cache=True,
            **{self._cache_keyword: self._cache},
            **self._last_only,
        )
        if self._experts is not None:
            self._experts.stop()
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    @torch.inference_mode()
    def _probe(self) -> tuple[dict[int, Shape], torch.dtype]:
        """Ask a model what its layers cache, by one token; ConfigError if none of them caches anything."""
        probe = ShapeProbe()
        self._cache = probe
        ids = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        self._forward(self._model, ids, self._masks.whole(1, self._dtype, self._device), ids)
        if not probe.shapes:
            raise ConfigError(f"{type(self._model).__name__} keeps no keys and values; the native engine needs them")
        return probe.shapes, probe.dtype

    def _window(self, positions: int) -> int:
        if not self._graphed:
            return min(self.length, -(-positions // _PLAIN_WINDOW) * _PLAIN_WINDOW)
        window = _FIRST_GRAPH_WINDOW
        while window < positions:
            window *= 2
        return min(self.length, window)

    def _fewest_rows(self, rows: int) -> int:
        if self._fused is not None:
            return (
                self.slots
            )  # Another number of rows is another program, whose compilation takes longer than it saves.
        if not self._graphed:
            return rows
        fewest = self.slots
        while -(-fewest // _FEWER_ROWS) >= rows and fewest > 1:
            fewest = -(-fewest // _FEWER_ROWS)
        return fewest
