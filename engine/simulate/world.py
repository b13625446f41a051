"""The simulated parts: a generator, a task, a tokenizer, a trainer rank, a plane. They cost virtual time alone.

A response is one number, the number under which its sample waits for its score, so that the real collector
carries it from the generator to the task's score.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import anyio
import torch

from asyncrl.collectors.engines.base import Cache
from asyncrl.collectors.generators.base import Completion, GroupRequest
from asyncrl.collectors.tasks import Reward, Task
from asyncrl.engine.aio.outbox import Numbered, Outbox
from asyncrl.engine.aio.signal import Signal
from asyncrl.engine.aio.waking import Waking
from asyncrl.engine.data_plane.base import Claim, Column, Lease
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.errors import AsyncRLError
from asyncrl.engine.records import GroupMeta, Prompt
from asyncrl.engine.records.work import ForwardWork, RankResult, TrainWork
from asyncrl.engine.simulate.profile import Burst, Profile, Rollout, seeded
from asyncrl.engine.weights.base import Sent, State
from asyncrl.engine.weights.stand_in import NoWeights

_OVERHEADS = {"publish": 1, "weights": 2, "hand_off": 3, "claim": 4, "judge": 5}


class Unscored(AsyncRLError, RuntimeError):
    """A simulated sample or group that fails, as often as it was told to."""


@dataclass(slots=True)
class PendingSamples:
    """Samples that are generated and not yet scored: by number, reward and tags."""

    samples: dict[int, tuple[float | None, Mapping[str, float]]] = field(default_factory=dict)
    _numbers: "count[int]" = field(default_factory=count)

    def write(self, rollout: Rollout, index: int) -> int:
        number = next(self._numbers)
        tags = {name: float(v) for name, values in rollout.tags.items() if (v := values[index]) is not None}
        self.samples[number] = (rollout.rewards[index], tags)
        return number


class SimulatedTokenizer:
    """A prompt's text is its place; a response is the first of its ids."""

    pad_id = 0
    eos_id = 1
    vocab_size = 2

    def __init__(self, profile: Profile) -> None:
        self._profile = profile

    def encode(self, text: str) -> list[int]:
        return [int(text)] * max(1, self._profile.prompt_tokens(int(text)))

    def encode_more(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, ids: list[int]) -> str:
        return str(ids[0])

    def whole_text(self, ids: Sequence[int]) -> str:
        return self.decode(list(ids))


class SimulatedTask(Task):
    def __init__(self, profile: Profile, pending: PendingSamples) -> None:
        # Ids are unique, so the text can be the id, whatever the prompt said; a string gives way to its place.
        ids = [p.id if isinstance(p.id, int) else -1 - place for place, p in enumerate(profile.prompts)]
        self._prompts = [
            Prompt(id=i, text=str(i), answer="", dataset=p.dataset) for i, p in zip(ids, profile.prompts, strict=True)
        ]
        self._pending = pending

    def prompts(self) -> Sequence[Prompt]:
        return self._prompts

    def score(self, prompt: Prompt, response: str) -> Reward:
        reward, tags = self._pending.samples.pop(int(response))
        if reward is None:
            raise Unscored("a sample without a reward")
        return Reward(reward, tags)


@dataclass(eq=False, slots=True)
class _Waiting:
    """A group that waits for its decode batch; `begun` is what the generator served when that began, and when."""

    request: GroupRequest
    done: anyio.Event = field(default_factory=anyio.Event)
    begun: "_Begun | None" = None


@dataclass(frozen=True, slots=True)
class _Begun:
    t: float
    version: int
    swaps: int


class SimulatedGenerator:
    """Works on up to `slots` groups at once; weights load beside it.

    Where the profile says `batched`, `slots` groups decode as one batch, the next after it; weights then load between
    two, unless `loads_beside`. With `in_flight_updates` weights change within a response; otherwise a response is of
    the version in force when it began. One that is `sliced` sleeps: groups stand still then, and a batch ends first.
    """

    def __init__(
        self,
        index: int,
        profile: Profile,
        pending: PendingSamples,
        *,
        seed: int,
        slots: int,
        in_flight_updates: bool = False,
        loads_beside: bool = False,
        sliced: bool = False,
    ) -> None:
        self._index = index
        self._profile = profile
        self._pending = pending
        self._seed = seed
        self._slots = slots
        self._places = anyio.Semaphore(slots)
        self._in_flight_updates = in_flight_updates
        self._loads_beside = loads_beside or not profile.batched
        self._waking = Waking() if sliced else None
        self._version = 0
        self._swaps: list[tuple[float, int]] = []
        self._burst = Burst(-1, 0, 0.0)
        self._burst_at = -1.0
        self._waiting: deque[_Waiting] = deque()
        self._changed = Signal()
        self._decoding = anyio.Lock()
        self._batches = 0

    async def run(self) -> None:
        while True:
            await self._changed.wait_until(
                lambda: bool(self._waiting) and not (self._waking is not None and self._waking.asleep)
            )
            async with self._decoding:
                batch = [self._waiting.popleft() for _ in range(min(self._slots, len(self._waiting)))]
                for waiting in batch:
                    waiting.request.turn(True)
                    waiting.begun = self._begun()
                self._batches += 1
                rng = seeded(self._seed, 17, self._index, self._batches)
                await anyio.sleep(self._profile.batch_seconds(rng, number=self._batches, groups=len(batch)))
            for waiting in batch:
                waiting.done.set()

    async def generate(self, request: GroupRequest) -> Sequence[Completion]:
        rng = seeded(self._seed, *request.seeds[:1])
        burst = self._place()
        if not self._profile.batched:
            async with self._places:
                request.turn(True)
                return await self._generate(request, rng, burst, self._begun())
        waiting = _Waiting(request)
        self._waiting.append(waiting)
        self._changed.notify()
        try:
            await waiting.done.wait()
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
        assert waiting.begun is not None
        return await self._generate(request, rng, burst, waiting.begun)

    async def _generate(self, request: GroupRequest, rng: Any, burst: Burst, begun: _Begun) -> Sequence[Completion]:
        version = begun.version
        rollout = self._profile.group(
            rng, prompt=request.prompt_ids[0], version=version, size=request.size, burst=burst
        )
        await (anyio.sleep(rollout.seconds) if self._waking is None else self._waking.last(rollout.seconds))
        if rollout.failed:
            raise Unscored("a group that fails")
        newer = self._swaps[begun.swaps :] if self._in_flight_updates else []
        seconds = self._now() - begun.t
        out = []
        for index, tokens in enumerate(rollout.response_tokens):
            ids = (self._pending.write(rollout, index),) * tokens
            spans = _spans(version, newer, started=begun.t, seconds=seconds, tokens=tokens)
            out.append(Completion(ids, (-1.0,) * tokens, spans, tokens < request.max_new_tokens))
        return out

    def _place(self) -> Burst:
        now = anyio.current_time()
        if now != self._burst_at:
            self._burst_at = now
            number = self._burst.number + 1
            self._burst = Burst(number, 0, float(seeded(self._seed, 11, self._index, number).random()))
        else:
            self._burst = Burst(self._burst.number, self._burst.place + 1, self._burst.draw)
        return self._burst

    async def update_weights(self, version: int, state: State) -> None:
        seconds = overhead(self._profile, "publish", seed=self._seed, number=version) if version else 0.0
        if self._loads_beside:
            await anyio.sleep(seconds)
        else:
            async with self._decoding:
                await anyio.sleep(seconds)
        self._version = version
        self._swaps.append((self._now(), version))

    async def sleep(self, cache: Cache) -> None:
        assert self._waking is not None
        self._waking.sleep()
        async with self._decoding:  # The batch that decodes ends first.
            pass

    async def wake(self) -> None:
        assert self._waking is not None
        self._waking.wake()
        self._changed.notify()

    def _begun(self) -> _Begun:
        return _Begun(self._now(), self._version, len(self._swaps))

    def _now(self) -> float:
        return anyio.current_time() if self._waking is None else self._waking.seconds

    async def stats(self) -> dict[str, Any]:
        return {"version": self._version}


def _spans(
    version: int, swaps: Sequence[tuple[float, int]], *, started: float, seconds: float, tokens: int
) -> tuple[tuple[int, int, int], ...]:
    """Tile a response whose tokens came evenly over `seconds` by the version in force."""
    spans, first = [], 0
    for when, newer in swaps:
        at = min(tokens, round(tokens * (when - started) / seconds)) if seconds else tokens
        if at > first:
            spans.append((version, first, at))
            first = at
        version = newer
    if first < tokens:
        spans.append((version, first, tokens))
    return tuple(spans)


def overhead(profile: Profile, kind: str, *, seed: int, number: int) -> float:
    """Draw the `number`-th overhead of a kind."""
    return profile.overhead(seeded(seed, 7, _OVERHEADS[kind], number), kind, number)


@dataclass(slots=True)
class SimulatedRank(NoWeights):
    """All ranks of a step take the same time: that of the whole step, fetching rows included."""

    name: str
    profile: Profile
    ranks: int
    seed: int
    outbox: Outbox = field(default_factory=Outbox)
    steps: int = 0

    async def train(self, work: TrainWork) -> RankResult:
        tokens = 0
        for batch in work.micro_batches:
            if not batch.filler:
                tokens += sum(work.samples[key].response_tokens for key in batch.keys)
        rng = seeded(self.seed, 13, work.step)
        self.steps = work.step
        await anyio.sleep(
            self.profile.step_seconds(rng, step=work.step, tokens_per_rank=work.total_tokens / self.ranks)
        )
        return RankResult(0.0, float(tokens), 0, 0.0, tokens, 1.0)

    async def logprobs(self, work: ForwardWork) -> dict[str, tuple[float, float]]:
        return {key: (0.0, 0.0) for batch in work.micro_batches if not batch.filler for key in batch.keys}

    async def warm_up(
        self, examples: Sequence[tuple[list[int], int]], *, steps: int, batch: int, learning_rate: float
    ) -> float:
        return 0.0

    async def weights(self) -> Sent:
        if self.steps:
            await anyio.sleep(overhead(self.profile, "weights", seed=self.seed, number=self.steps))
        return Sent({})

    async def digest(self) -> Mapping[str, int]:
        return {}

    async def events(self, after_seq: int, wait_s: float) -> list[Numbered]:
        return await self.outbox.after(after_seq, wait_s)


class SimulatedPlane(LocalPlane):
    """A LocalPlane that keeps no bytes; claims, judging and hand-off take the profile's time."""

    def __init__(self, profile: Profile, seed: int, **plane: Any) -> None:
        super().__init__(**plane)
        self._profile = profile
        self._seed = seed
        self._numbers = dict.fromkeys(_OVERHEADS, 0)

    def _draw(self, kind: str) -> float:
        self._numbers[kind] += 1
        return overhead(self._profile, kind, seed=self._seed, number=self._numbers[kind])

    async def put(self, partition: str, group: GroupMeta, columns: Mapping[str, Column]) -> GroupMeta:
        return await super().put(partition, group, {name: [_NOTHING] * group.size for name in columns})

    async def claim(self, *args: Any, **how: Any) -> Claim:
        await anyio.sleep(self._draw("claim"))
        return await super().claim(*args, **how)

    async def leased(self, lease: Lease) -> frozenset[str]:
        await anyio.sleep(self._draw("hand_off"))
        return await super().leased(lease)

    async def clear(self, partition: str, keys: Sequence[str], *, lease: Lease | None = None) -> None:
        await anyio.sleep(self._draw("judge") if lease is not None else 0.0)
        await super().clear(partition, keys, lease=lease)


_NOTHING = torch.zeros(0)
