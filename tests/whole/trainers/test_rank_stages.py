"""What a rank does around its backend: who writes back, what rides along, what it leaves alone, how long it takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
import torch

from asyncrl.engine.aio.blocking import in_place
from asyncrl.engine.aio.virtual_time import run_virtual
from asyncrl.engine.data_plane.base import Partition
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.errors import MissingRows
from asyncrl.engine.records import GroupMeta, MicroBatch
from asyncrl.engine.records.columns import LOGPROBS, REFERENCE_LOGPROBS, TOKENS, TRAINER_LOGPROBS
from asyncrl.engine.records.group import GROUP, VERSION
from asyncrl.engine.records.keys import sample_keys
from asyncrl.engine.records.work import ForwardWork, SampleWork, TrainWork
from asyncrl.engine.weights.base import InProcess
from asyncrl.trainers.backends.base import Rows
from asyncrl.trainers.extras import extras_of
from asyncrl.trainers.fetch import Policy
from asyncrl.trainers.rank import RankSettings, TrainerRank
from asyncrl.trainers.reducer import Alone

KEYS = sample_keys(0, 0, 2)
EXTRAS: dict[str, list[Any]] = {"pixels": [torch.ones(2, 3), torch.zeros(1, 3)], "caption": ["a", "b"]}


@dataclass
class Place:
    """A sibling that needs no others: what it is sent is its own."""

    index: int
    count: int = 2
    sent: list[torch.Tensor] = field(default_factory=list)

    async def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        self.sent.append(values)
        return values


class OnePlane(LocalPlane):
    """Gives the same tensors at every read, as a plane of shared memory does, and notes the columns asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, ...]] = []
        self.given: dict[tuple[str, str], Any] = {}

    async def read(self, partition: str, keys: Sequence[str], columns: Sequence[str]) -> dict[str, list[Any]]:
        self.asked.append(tuple(columns))
        found = await super().read(partition, keys, columns)
        return {
            name: [self.given.setdefault((name, key), value) for key, value in zip(keys, values, strict=True)]
            for name, values in found.items()
        }


@dataclass
class Scene:
    plane: OnePlane
    rank: TrainerRank
    rows: list[Rows]


async def build(backend: Any, *, siblings: Any = None, policy: Policy = "independent", min_step_s: float = 0) -> Scene:
    plane, rows = OnePlane(), []
    columns: dict[str, list[Any]] = {
        TOKENS: [torch.tensor([1, 2, 3, 4]), torch.tensor([5, 6, 7])],
        LOGPROBS: [torch.tensor([-1.0, -2.0], dtype=torch.float64), torch.tensor([-0.5], dtype=torch.float64)],
        **EXTRAS,
    }
    await plane.register(Partition("train", 2, tuple(columns), ("trainer",), ("caption",)))
    await plane.put("train", GroupMeta(KEYS, {VERSION: 0, GROUP: 0}), columns)
    accumulate, logprobs = backend.accumulate, backend.logprobs

    class Listening:
        """The backend, without extras, which its model does not know."""

        def __getattr__(self, name: str) -> Any:
            return getattr(backend, name)

        def accumulate(self, given: Rows, total: int) -> Any:
            rows.append(given)
            return accumulate(plain(given), total)

        def logprobs(self, given: Rows, *, reference: bool = False) -> Any:
            rows.append(given)
            return logprobs(plain(given), reference=reference)

    extras = tuple(extras_of(await plane.partition("train")))
    rank = TrainerRank(
        RankSettings(0, 1, "train", learning_rate=1e-3, min_step_s=min_step_s, fetch_policy=policy, extras=extras),
        backend=Listening(),
        plane=plane,
        reducer=Alone(),
        transport=InProcess(),
        blocking=in_place,
        siblings=siblings,
    )
    return Scene(plane, rank, rows)


def plain(rows: Rows) -> Rows:
    return Rows(rows.tokens, rows.logprobs, rows.prompt_tokens, rows.advantages, rows.withheld, rows.filler)


SAMPLES = {key: SampleWork(key, 2, 2, 1.0) for key in KEYS}


def work() -> TrainWork:
    return TrainWork(1, (MicroBatch(KEYS, 7),), SAMPLES, total_tokens=3)


def forward(stage: str, *, write: bool = False) -> ForwardWork:
    reference = stage == "reference_logprobs"
    return ForwardWork(1, (MicroBatch(KEYS, 7),), SAMPLES, total_tokens=3, reference=reference, write=write)


@pytest.mark.parametrize(("policy", "index"), [("independent", 0), ("independent", 1), ("leader", 0)])
def test_the_one_leader_writes_back_whoever_fetches(
    causal_mean: Any, make_backend: Callable[..., Any], policy: Policy, index: int
) -> None:
    """Index 0 of tensor, context and pipeline, always; a second writer would break stores that refuse one."""

    async def main() -> bool:
        scene = await build(make_backend(causal_mean), siblings=Place(index), policy=policy)
        await scene.rank.logprobs(forward("logprobs", write=True))
        try:
            await scene.plane.read("train", KEYS, [TRAINER_LOGPROBS])
        except MissingRows:
            return False
        return True

    assert run_virtual(main) is (index == 0)


@pytest.mark.parametrize(
    ("stage", "columns"),
    [("train", (TOKENS, LOGPROBS)), ("logprobs", (TOKENS, LOGPROBS)), ("reference_logprobs", (TOKENS,))],
)
def test_a_stage_reads_the_columns_it_needs_and_tensor_extras(
    causal_mean: Any, make_backend: Callable[..., Any], stage: str, columns: tuple[str, ...]
) -> None:
    """Multimodal columns ride along unasked; those of other objects are not even read."""

    async def main() -> Scene:
        scene = await build(make_backend(causal_mean, reference_kl=0.1))
        await (scene.rank.train(work()) if stage == "train" else scene.rank.logprobs(forward(stage)))
        return scene

    scene = run_virtual(main)
    assert scene.plane.asked == [(*columns, "pixels")]
    (rows,) = scene.rows
    assert list(rows.extras) == ["pixels"]
    assert [value.tolist() for value in rows.extras["pixels"]] == [v.tolist() for v in EXTRAS["pixels"]]


def test_values_of_the_plane_are_never_written_to(causal_mean: Any, make_backend: Callable[..., Any]) -> None:
    """They may be views of memory that other processes read."""

    async def main() -> tuple[list[Any], list[Any]]:
        scene = await build(make_backend(causal_mean, reference_kl=0.1))
        await scene.rank.logprobs(forward("logprobs", write=True))
        await scene.rank.logprobs(forward("reference_logprobs", write=True))
        await scene.plane.read("train", KEYS, [TRAINER_LOGPROBS, REFERENCE_LOGPROBS])
        before = [value.clone() for (name, _), value in scene.plane.given.items() if name not in EXTRAS]
        await scene.rank.train(work())
        return before, [value for (name, _), value in scene.plane.given.items() if name not in EXTRAS]

    before, after = run_virtual(main)
    assert len(before) == len(after) == 8
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize(("min_s", "took"), [(0.0, 0.0), (2.5, 2.5)])
def test_a_step_takes_at_least_as_long_as_told(
    causal_mean: Any, make_backend: Callable[..., Any], min_s: float, took: float
) -> None:
    async def main() -> float:
        scene = await build(make_backend(causal_mean), min_step_s=min_s)
        started = anyio.current_time()
        await scene.rank.train(work())
        return anyio.current_time() - started

    assert run_virtual(main) == pytest.approx(took)


def test_the_reference_is_what_the_warm_up_ends_with(causal_mean: Any, make_backend: Callable[..., Any]) -> None:
    backend = make_backend(causal_mean, reference_kl=0.1)
    rows = Rows([torch.tensor([1, 2, 3])], (), [1], [0.0], [0], filler=False)
    before = backend.logprobs(rows, reference=True)[0]

    async def main() -> None:
        scene = await build(backend)
        await scene.rank.warm_up([([1, 2, 3], 1)], steps=2, batch=1, learning_rate=0.1)

    run_virtual(main)
    assert torch.equal(backend.logprobs(rows)[0], backend.logprobs(rows, reference=True)[0])
    assert not torch.equal(backend.logprobs(rows)[0], before)


def test_images_go_to_the_model_concatenated_over_samples(causal_mean: Any, make_backend: Callable[..., Any]) -> None:
    seen: list[torch.Tensor] = []

    class Seeing(type(causal_mean)):  # type: ignore[misc]
        def forward(self, input_ids: Any, attention_mask: Any, use_cache: bool, pixels: torch.Tensor) -> Any:
            seen.append(pixels)
            return super().forward(input_ids, attention_mask, use_cache)

    pixels = [torch.ones(2, 3), torch.zeros(1, 3)]
    tokens = [torch.tensor([1, 2, 3]), torch.tensor([4, 5])]
    rows = Rows(tokens, (), [1, 1], [0.0] * 2, [0] * 2, filler=False, extras={"pixels": pixels})
    make_backend(Seeing()).logprobs(rows)
    assert torch.equal(seen[0], torch.cat(pixels))
