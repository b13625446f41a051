"""Generation in PyTorch: batched decoding with a key-value cache, on the model's own device.

Requests that wait when a decode batch ends form the next one; weights are swapped between
batches, so a completion is of one version. Randomness is a function of the sample's seed alone:
sample i takes its t-th token where its t-th uniform number falls in the cumulated distribution.
"""

import inspect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
import numpy as np
import torch

from asyncrl.collectors.engines.base import Cache
from asyncrl.collectors.engines.stopwatch import Stopwatch
from asyncrl.collectors.generators.base import Completion, GroupRequest
from asyncrl.configs.sections.fields import MIN_TEMPERATURE
from asyncrl.engine.aio.blocking import Blocking
from asyncrl.engine.aio.signal import Signal
from asyncrl.engine.errors import GenerationError, VersionError
from asyncrl.engine.model.causal_lm import token_logprobs
from asyncrl.engine.model.off_load import OffLoad
from asyncrl.engine.weights.base import State


@dataclass(eq=False, slots=True)
class _Waiting:
    """A request in the queue; `apart` if it has to decode alone, after a batch that it was in has failed."""

    request: GroupRequest
    apart: bool = False
    done: anyio.Event = field(default_factory=anyio.Event)
    completions: list[Completion] = field(default_factory=list)
    error: Exception | None = None
    given_up: bool = False


@dataclass(eq=False, slots=True)
class _Update:
    version: int
    state: State
    done: anyio.Event = field(default_factory=anyio.Event)
    error: Exception | None = None


class TorchGenerator:
    """`decode_samples` decode together at most; with `alone`, one group a batch, for exact repetition.

    `blocking` runs a blocking call where it does not stop the event loop (a thread), or in place. Each of
    `stop_ids` ends a response as `eos_id` does. `positions` is the model's longest sequence, None without a bound.
    """

    def __init__(
        self,
        model: Any,
        *,
        eos_id: int,
        pad_id: int,
        decode_samples: int,
        alone: bool,
        blocking: Blocking[Any],
        stop_ids: Sequence[int] = (),
        positions: int | None = None,
    ) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        # transformers renames it between versions, and models differ in the order of their arguments.
        known = inspect.signature(model.forward).parameters
        self._cache_keyword = "cache" if "cache" in known else "past_key_values"
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        self._stops = frozenset({eos_id, *stop_ids})
        self._stop_ids = torch.tensor(sorted(self._stops), device=self._device)
        self._positions = positions
        self._pad_id = pad_id
        self._decode_samples = decode_samples
        self._alone = alone
        self._blocking = blocking
        self._waiting: deque[_Waiting] = deque()
        self._running = 0
        self._update: _Update | None = None
        self._changed = Signal()
        self._away = OffLoad(self._device)
        self._sleeps = self._asleep = False
        self._version = 0
        self._tokens = 0
        self._watch = Stopwatch()

    async def run(self) -> None:
        while True:
            await self._changed.wait_until(self._has_work)
            if self._asleep != self._sleeps:
                await self._move()
                continue
            if self._update is not None:
                await self._swap(self._update)
                continue
            batch = self._next_batch()
            self._running = sum(len(waiting.request.seeds) for waiting in batch)
            self._watch.turn(busy=True)
            await self._serve(batch)
            self._running = 0
            self._watch.turn(busy=False)

    async def generate(self, request: GroupRequest) -> Sequence[Completion]:
        if not request.prompt_ids:
            raise GenerationError("the prompt has no tokens; generation needs at least one")
        needed = len(request.prompt_ids) + request.max_new_tokens
        if self._positions is not None and needed > self._positions:
            raise GenerationError(
                f"a prompt of {len(request.prompt_ids)} tokens and {request.max_new_tokens} new ones need {needed} "
                f"positions; the model has {self._positions}"
            )
        waiting = _Waiting(replace(request, seeds=request.seeds[: request.size], surplus=0))
        self._waiting.append(waiting)
        self._changed.notify()
        try:
            await waiting.done.wait()
        finally:
            waiting.given_up = True
            if waiting in self._waiting:
                self._waiting.remove(waiting)
        if waiting.error is not None:
            raise GenerationError(f"decoding it failed: {waiting.error!r}") from waiting.error
        return waiting.completions

    async def update_weights(self, version: int, state: State) -> None:
        if self._update is not None:
            raise VersionError(f"update to version {version} while {self._update.version} is under way")
        if version < self._version:
            raise VersionError(f"generator serves version {self._version} and was given {version}")
        update = self._update = _Update(version, state)
        self._changed.notify()
        try:
            await update.done.wait()
        finally:
            if self._update is update:
                self._update = None
        if update.error is not None:
            raise VersionError(f"version {version} was not loaded: {update.error}") from update.error

    async def sleep(self, cache: Cache) -> None:
        """The batch that decodes ends first; there is no cache between two."""
        self._sleeps = True
        self._changed.notify()
        await self._changed.wait_until(lambda: self._asleep or not self._sleeps)

    async def wake(self) -> None:
        self._sleeps = False
        self._changed.notify()
        await self._changed.wait_until(lambda: not self._asleep or self._sleeps)

    async def stats(self) -> dict[str, Any]:
        busy_s, paused_s = self._watch.read()
        return {
            "running": self._running,
            "waiting": sum(len(waiting.request.seeds) for waiting in self._waiting),
            "cache_used": 0.0,
            "tokens": self._tokens,
            "busy_s": busy_s,
            "paused_s": paused_s,
            "version": self._version,
        }

    def _has_work(self) -> bool:
        able = bool(self._waiting) and not self._asleep
        return able or self._update is not None or self._asleep != self._sleeps

    async def _move(self) -> None:
        """Leave the device, or come back to it."""
        leaves, weights = self._sleeps, [*self._model.parameters(), *self._model.buffers()]
        await self._blocking(lambda: self._away.leave(weights) if leaves else self._away.come_back())
        self._asleep = leaves
        self._watch.turn(paused=self._asleep)
        self._changed.notify()

    async def _serve(self, batch: Sequence[_Waiting]) -> None:
        requests = [waiting.request for waiting in batch]
        for request in requests:
            request.turn(True)
        try:
            completions = await self._blocking(lambda: self.decode(requests))
        except Exception as error:  # The edge of generation: of a batch, each decodes again alone.
            if len(batch) > 1:
                self._set_apart(batch)
                return
            batch[0].error = error
        else:
            for waiting, done in zip(batch, completions, strict=True):
                waiting.completions = done
        for waiting in batch:
            waiting.done.set()

    def _set_apart(self, batch: Sequence[_Waiting]) -> None:
        """Bring a failed batch back to the queue, so that only the request that made it fail does so again."""
        for waiting in reversed(batch):
            waiting.apart = True
            waiting.request.turn(False)
            if not waiting.given_up:
                self._waiting.appendleft(waiting)

    async def _swap(self, update: _Update) -> None:
        self._watch.turn(paused=True)
        try:
            await self._blocking(lambda: self._load(update.state))
            self._version = update.version
        except Exception as error:  # The updater's error: the generator serves on with what it has.
            update.error = error
        self._watch.turn(paused=self._asleep)
        # A caller that gave up has made room, perhaps for the next update.
        if self._update is update:
            self._update = None
        update.done.set()

    def _load(self, state: State) -> None:
        """Load all weights or none: torch copies what fits before it complains about the rest."""
        mine = {name: tensor.shape for name, tensor in self._model.state_dict().items()}
        given = {name: tensor.shape for name, tensor in state.items()}
        if mine != given:
            differ = sorted(name for name in {*mine, *given} if mine.get(name) != given.get(name))
            raise ValueError(f"{len(differ)} of {len(mine)} weights differ in name or shape, first {differ[0]}")
        self._model.load_state_dict(dict(state), strict=True)

    def _next_batch(self) -> list[_Waiting]:
        batch = [self._waiting.popleft()]
        samples = len(batch[0].request.seeds)
        while self._waiting and not (self._alone or batch[0].apart or self._waiting[0].apart):
            nxt = self._waiting[0].request
            same = nxt.temperature == batch[0].request.temperature
            if not same or samples + len(nxt.seeds) > self._decode_samples:
                break
            samples += len(nxt.seeds)
            batch.append(self._waiting.popleft())
        return batch

    @torch.inference_mode()
    def decode(self, requests: Sequence[GroupRequest]) -> list[list[Completion]]:
        """Decode all samples of `requests` together (B samples), left-padded prompts, until all end."""
        from transformers import DynamicCache  # The driver never decodes; it starts sooner without.

        prompts = [request.prompt_ids for request in requests for _ in request.seeds]
        limits = np.array([request.max_new_tokens for request in requests for _ in request.seeds])
        steps = int(limits.max())
        uniform = np.stack([_uniform(seed, steps) for request in requests for seed in request.seeds])
        width = max(map(len, prompts))
        ids = torch.tensor([[self._pad_id] * (width - len(p)) + list(p) for p in prompts], device=self._device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self._device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        draws = torch.from_numpy(uniform).to(self._device)
        cache = DynamicCache(config=self._model.config)
        # As good as the likeliest token: logits are divided.
        temperature = requests[0].temperature or MIN_TEMPERATURE
        open_samples = torch.ones(len(prompts), dtype=torch.bool, device=self._device)
        tokens, logprobs = [], []
        last_allowed = torch.from_numpy(limits).to(self._device) - 1
        for step in range(steps):
            logits = self._model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                **{self._cache_keyword: cache, **self._last_only},
            ).logits[:, -1]
            chosen = _sample(logits, draws[:, step], temperature)
            tokens.append(torch.where(open_samples, chosen, -1))
            logprobs.append(token_logprobs(logits, chosen, temperature))
            open_samples = open_samples & ~torch.isin(chosen, self._stop_ids) & (last_allowed > step)
            if not open_samples.any():
                break
            ids = chosen.unsqueeze(1)
            mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
            positions = positions[:, -1:] + 1
        return self._completions(requests, torch.stack(tokens, 1).tolist(), torch.stack(logprobs, 1).tolist())

    def _completions(
        self, requests: Sequence[GroupRequest], tokens: list[list[int]], logprobs: list[list[float]]
    ) -> list[list[Completion]]:
        out: list[list[Completion]] = []
        sample = 0
        for request in requests:
            group = []
            for _ in request.seeds:
                ids = tuple(token for token in tokens[sample] if token >= 0)
                self._tokens += len(ids)
                group.append(
                    Completion(
                        token_ids=ids,
                        logprobs=tuple(logprobs[sample][: len(ids)]),
                        spans=((self._version, 0, len(ids)),),
                        finished=ids[-1] in self._stops,
                    )
                )
                sample += 1
            out.append(group)
        return out


def _uniform(seed: int, count: int) -> np.ndarray[Any, Any]:
    return np.random.Generator(np.random.Philox(seed)).random(count)


def _sample(logits: torch.Tensor, draws: torch.Tensor, temperature: float) -> torch.Tensor:
    """Take, per row of (B, vocabulary), the token where `draws` (B, in [0, 1)) falls in the cumulated distribution."""
    cumulated = torch.softmax(logits.double() / temperature, dim=-1).cumsum(-1)
    picked = torch.searchsorted(cumulated, (draws * cumulated[:, -1]).unsqueeze(1), right=True).squeeze(1)
    return picked.clamp(max=logits.shape[-1] - 1)
