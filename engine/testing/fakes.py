"""Fakes with real behaviour at the seams: they take time, fail, hang and count, as told."""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import anyio

from asyncrl.collectors.engines.base import Cache
from asyncrl.collectors.generators.base import Completion, GroupRequest
from asyncrl.collectors.tasks import Reward, Task
from asyncrl.engine.aio.outbox import Numbered, Outbox
from asyncrl.engine.aio.waking import Waking
from asyncrl.engine.data_plane.base import DataPlane
from asyncrl.engine.data_plane.passing import PassingPlane
from asyncrl.engine.deployment import PARTITION
from asyncrl.engine.errors import VersionError
from asyncrl.engine.loop.prompt_source import Listed
from asyncrl.engine.model.tokenizer import CharTokenizer
from asyncrl.engine.records import GroupMeta, Prompt
from asyncrl.engine.records.columns import COLUMNS, LOGPROBS
from asyncrl.engine.records.generated import count_generated, read_generated
from asyncrl.engine.records.group import FAILED, FINISHED
from asyncrl.engine.records.keys import sample_keys
from asyncrl.engine.records.work import ForwardWork, RankResult, SampleWork, TrainWork
from asyncrl.engine.weights.base import State
from asyncrl.engine.weights.stand_in import NoWeights

HANG_S = 1e9
Result = TypeVar("Result")


def fake_group(
    group: int, rewards: Sequence[float | None], *, version: int = 0, failed: Sequence[int] = (), **tags: Any
) -> GroupMeta:
    """Make a group's metadata by hand: two response tokens per sample, none for the indexes in `failed`."""
    size = len(rewards)
    tokens = [0 if i in failed else 2 for i in range(size)]
    base = {
        "group": group,
        "prompt": group,
        "dataset": "fake",
        "version": version,
        "end_version": version,
        "prompt_tokens": 2,
        "response_tokens": tokens,
        "trainable_tokens": tokens,
        "reward": [None if i in failed else reward for i, reward in enumerate(rewards)],
        "status": [FAILED if i in failed else FINISHED for i in range(size)],
        "cause": ["score_error" if i in failed else None for i in range(size)],
    }
    return GroupMeta(sample_keys(version, group, size), {**base, **tags})


@dataclass(slots=True)
class FakeGenerator:
    """Takes `seconds(call)` for its n-th call (from 0), then answers sample i with the text of i.

    `fail(call)` may raise. `length(call)` is the response length in tokens, end included. Weights
    are whatever version was loaded last; `refuse(version)` may raise or return seconds to take.
    """

    seconds: Callable[[int], float] = lambda _: 1.0
    fail: Callable[[int], None] = lambda _: None
    length: Callable[[int], int] = lambda _: 2
    refuse: Callable[[int], float] = lambda _: 0.0
    calls: int = 0
    running: int = 0
    version: int = 0
    updates: list[int] = field(default_factory=list)
    loaded_at: dict[int, float] = field(default_factory=dict)
    loading: int | None = None
    waking: Waking | None = None

    def anew(self) -> "FakeGenerator":
        """Return one like it that has done nothing yet."""
        return replace(self, calls=0, running=0, version=0, updates=[], loaded_at={}, loading=None, waking=None)

    async def run(self) -> None:
        await anyio.sleep_forever()

    async def generate(self, request: GroupRequest) -> Sequence[Completion]:
        call = self.calls
        self.calls += 1
        self.running += 1
        started = self.version
        request.turn(True)
        try:
            seconds = self.seconds(call)
            await (anyio.sleep(seconds) if self.waking is None else self.waking.last(seconds))
            self.fail(call)
        finally:
            self.running -= 1
        tokenizer = CharTokenizer()
        size = self.length(call)
        out = []
        for index in range(request.size):
            text = (str(index) * size)[: size - 1] if size > 1 else ""
            ids = (*tokenizer.encode(text), tokenizer.eos_id)
            out.append(Completion(ids, (-1.0,) * len(ids), ((started, 0, len(ids)),), True))
        return out

    async def update_weights(self, version: int, state: State) -> None:
        if self.loading is not None:
            raise VersionError(f"update to version {version} while {self.loading} is under way")
        self.updates.append(version)
        self.loading = version
        try:
            await anyio.sleep(self.refuse(version))
        finally:
            self.loading = None
        self.version = version
        self.loaded_at.setdefault(version, anyio.current_time())

    async def sleep(self, cache: Cache) -> None:
        self.waking = self.waking or Waking()
        self.waking.sleep()

    async def wake(self) -> None:
        if self.waking is not None:
            self.waking.wake()

    async def stats(self) -> dict[str, Any]:
        return {"running": self.running, "version": self.version}


class FakeTask(Task):
    """`reward(prompt id, sample index)` scores; it may return a Reward, NaN, or raise."""

    def __init__(self, prompts: int = 4, reward: Callable[[int, int], Reward | float] | None = None) -> None:
        self._prompts = prompts
        self._reward = reward or (lambda prompt, index: float(index % 2))

    @classmethod
    def in_order(cls, reward: Callable[[int, int], Reward | float], *, prompts: int = 64, seed: int = 0) -> "FakeTask":
        """Score by (dispatch number, sample index) instead; later epochs repeat the first one's prompts."""
        task = cls(prompts)
        first_epoch = Listed(task.prompts(), seed=seed, epochs=1)
        place = {prompt.id: number for number, prompt in enumerate(first_epoch)}
        return cls(prompts, lambda prompt, index: reward(place[prompt], index))

    def prompts(self) -> Sequence[Prompt]:
        return [Prompt(id=i, text=f"{i}>", answer=str(i), dataset="fake") for i in range(self._prompts)]

    def score(self, prompt: Prompt, response: str) -> Reward | float:
        index = int(response[0]) if response else 0
        return self._reward(int(prompt.id), index)


def _trained(sample: SampleWork, tokens: int) -> int:
    return count_generated(read_generated(sample.generated, tokens), sample.withheld, tokens)


@dataclass(slots=True)
class FakeRank(NoWeights):
    """Reads its rows from the plane like a real rank, takes `seconds(step)`, and counts tokens."""

    name: str
    plane: DataPlane
    seconds: Callable[[int], float] = lambda _: 1.0
    fail: Callable[[int], None] = lambda _: None
    gap: Callable[[str], tuple[float, float]] = lambda _: (0.0, 0.0)
    trained: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    withheld: dict[tuple[int, str], int] = field(default_factory=dict)
    outbox: Outbox = field(default_factory=Outbox)
    steps: int = 0

    async def train(self, work: TrainWork) -> RankResult:
        keys = [key for batch in work.micro_batches for key in batch.keys if not batch.filler]
        columns: Mapping[str, list[Any]] = {LOGPROBS: []}
        if keys:
            columns = await self.plane.read(PARTITION, keys, COLUMNS)
        await anyio.sleep(self.seconds(work.step))
        self.fail(work.step)
        self.trained.append((work.step, tuple(keys)))
        self.withheld.update(((work.step, key), work.samples[key].withheld) for key in keys)
        self.steps = work.step
        tokens = sum(_trained(work.samples[key], len(v)) for key, v in zip(keys, columns[LOGPROBS], strict=True))
        return RankResult(0.0, float(tokens), 0, 0.0, tokens, 1.0)

    async def logprobs(self, work: ForwardWork) -> dict[str, tuple[float, float]]:
        await anyio.sleep(self.seconds(work.step))
        return {key: self.gap(key) for batch in work.micro_batches if not batch.filler for key in batch.keys}

    async def warm_up(
        self, examples: Sequence[tuple[list[int], int]], *, steps: int, batch: int, learning_rate: float
    ) -> float:
        await anyio.sleep(steps * self.seconds(0))
        return 0.0

    async def digest(self) -> Mapping[str, int]:
        return {}

    async def events(self, after_seq: int, wait_s: float) -> list[Numbered]:
        return await self.outbox.after(after_seq, wait_s)


class FaultyPlane(PassingPlane):
    """A plane that passes everything on, after `before[operation](call number)`, which may raise or wait."""

    def __init__(self, plane: DataPlane, before: Mapping[str, Callable[[int], Any]]) -> None:
        super().__init__(plane)
        self._before = before
        self._calls: Counter[str] = Counter()

    async def _pass(self, operation: str, partition: str, call: Callable[[], Awaitable[Result]]) -> Result:
        if operation in self._before:
            self._calls[operation] += 1
            waiting = self._before[operation](self._calls[operation])
            if waiting is not None:
                await waiting
        return await call()
