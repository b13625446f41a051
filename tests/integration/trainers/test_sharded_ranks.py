"""Ranks that keep a model together, as real gloo processes, beside one rank that has all of it."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from asyncrl.engine.loop.selection import Selection
from asyncrl.engine.loop.stages import Stages
from asyncrl.engine.records.keys import sample_keys
from asyncrl.engine.records.work import ForwardWork, RankResult, SampleWork, TrainWork
from asyncrl.engine.testing.conformance.sharded_rank import VOCABULARY, Found, Task, run
from asyncrl.engine.testing.simulation import simulated_config
from asyncrl.trainers.backends.torch_settings import TorchSettings
from asyncrl.trainers.loss.objective import Clip
from asyncrl.trainers.reducer import MeetingPoint

SETTINGS = TorchSettings(1.0, Clip(low=0.2, high=0.3, dual=3.0), (0.9, 0.95), 0.1, 1.0, share_prompts=False)
PROGRAM = "asyncrl.engine.testing.conformance.sharded_rank"
Together = Callable[[Task], list[Found]]


class Planned:
    """Takes the works of a rank, and does as if they were done."""

    def __init__(self) -> None:
        self.works: list[ForwardWork | TrainWork] = []

    async def train(self, work: TrainWork) -> RankResult:
        self.works.append(work)
        tokens = sum(work.samples[key].response_tokens for key in self._keys(work))
        return RankResult(0.0, 0.0, 0, 0.0, tokens, 0.0, 0.0)

    async def logprobs(self, work: ForwardWork) -> dict[str, tuple[float, float]]:
        self.works.append(work)
        return dict.fromkeys(self._keys(work), (0.0, 0.0))

    def _keys(self, work: ForwardWork | TrainWork) -> list[str]:
        return [key for batch in work.micro_batches if not batch.filler for key in batch.keys]


def task_of(
    ranks: int, shard_ranks: int, *, decoupled: bool = False, steps: Sequence[int] = (1, 2, 3), **more: Any
) -> Task:
    """Plan steps of five samples, as a run would: no two fit into a micro-batch, and the rest of those are fillers.

    `decoupled`: two updates per batch, the policy's own log-probabilities and those of a reference.
    """
    options: dict[str, Any] = {"trainer__micro_batch_tokens": 16, "trainer__forward_tokens": 16}
    if decoupled:
        options |= {"trainer__updates_per_batch": 2, "trainer__reference_kl": 0.1}
    sharding = "none" if shard_ranks == 1 else "full" if shard_ranks == ranks else "hybrid"
    if sharding != "none":
        options |= {"trainer__sharding": sharding, "trainer__ranks": ranks, "run__runtime": "ray"}
    if sharding == "hybrid":
        options["trainer__shard_ranks"] = shard_ranks
    config = simulated_config(**options)
    planned = [Planned() for _ in range(ranks)]
    rows: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    async def plan() -> None:
        stages = Stages(config, ranks=planned, cost=None)  # type: ignore[arg-type]
        for step in steps:
            selection, own = _selection(step)
            rows.update(own)
            await stages.logprobs(selection, step=step, write=True)
            if decoupled:
                await stages.reference_logprobs(selection, step=step)
            await stages.train(stages.plan(selection), selection, step=step)

    anyio.run(plan)
    settings = replace(SETTINGS, reference_kl=0.1 if decoupled else 0.0, **more.pop("settings", {}))
    return Task(ranks, shard_ranks, settings, [one.works for one in planned], rows, **more)


def _selection(step: int) -> tuple[Selection, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    draw = torch.Generator().manual_seed(step)
    keys = sample_keys(0, step, 5)
    lengths = dict(zip(keys, (15, 9, 12, 8, 14), strict=True))
    rows, samples = {}, {}
    for number, (key, length) in enumerate(lengths.items()):
        prompt = 1 + number % 3
        ids = torch.randint(1, VOCABULARY, (length,), generator=draw, dtype=torch.int32)
        rows[key] = ids, -2.6 + 0.4 * torch.randn(length - prompt, generator=draw, dtype=torch.float64)
        samples[key] = SampleWork(key, prompt, length - prompt, (-1.0) ** number * (0.3 + 0.2 * number))
    return Selection(samples=samples, lengths=lengths, ages=dict.fromkeys(keys, 0), masks={}, reward_sum=0.0), rows


@pytest.fixture
def together(tmp_path: Path, warm_python: Any) -> Together:
    """Run a task's ranks as processes; return what each found."""

    def run_ranks(task: Task) -> list[Found]:
        folder = tmp_path / f"ranks-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "task").write_bytes(pickle.dumps(task))
        point = MeetingPoint()
        files = [folder / f"found-{rank}" for rank in range(task.ranks)]
        members = [
            warm_python.start(folder, "-m", PROGRAM, str(rank), point.address, str(folder / "task"), str(files[rank]))
            for rank in range(task.ranks)
        ]
        for member in members:
            _, err = member.communicate(timeout=100)
            assert member.returncode == 0, err
        return [pickle.loads(file.read_bytes()) for file in files]

    return run_ranks


def alone(task: Task) -> Found:
    """Run a task of one rank in this process."""
    return anyio.run(run, 0, "", task)


def gradient(ranks: Sequence[Found], update: int) -> dict[str, torch.Tensor]:
    """Join the ranks' parts of the gradients of an update; parts that several have must be equal."""
    joined: dict[str, torch.Tensor] = {}
    for found in ranks:
        for name, (offsets, shape, values) in found.gradients[update].items():
            whole = joined.setdefault(name, torch.full(shape, torch.nan, dtype=values.dtype))
            box = whole[tuple(slice(at, at + size) for at, size in zip(offsets, values.shape, strict=True))]
            if not box.isnan().any():
                torch.testing.assert_close(box, values, rtol=0, atol=1e-12)
            box.copy_(values)
    return joined


def check_close(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], atol: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=atol, msg=name)


def check_equal_to_one(ranks: Sequence[Found], one: Found, atol: float) -> None:
    check_close(ranks[0].logprobs, one.logprobs, atol)
    check_close(ranks[0].weights, one.weights, atol)
    assert len(one.gradients) == len(ranks[0].gradients)
    for update in range(len(one.gradients)):
        check_close(gradient(ranks, update), gradient([one], update), atol)
    for step, result in enumerate(one.results):
        assert sum(found.results[step].loss for found in ranks) == pytest.approx(result.loss, abs=atol)
        assert sum(found.results[step].tokens for found in ranks) == result.tokens
        assert ranks[-1].results[step].grad_norm == pytest.approx(result.grad_norm, abs=atol)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("ranks", "shard_ranks", "packed", "reshard"),
    [
        pytest.param(2, 2, True, True, id="full-2-packed"),
        pytest.param(2, 2, False, False, id="full-2-padded-whole"),
        pytest.param(4, 4, False, True, id="full-4-padded", marks=pytest.mark.long),
        pytest.param(4, 2, False, True, id="hybrid-4-padded"),
        pytest.param(4, 2, True, False, id="hybrid-4-packed-whole", marks=pytest.mark.long),
    ],
)
def test_three_steps_of_sharded_ranks_are_those_of_one(
    together: Together, ranks: int, shard_ranks: int, packed: bool, reshard: bool
) -> None:
    """Log-probabilities, loss, gradients, norm and weights, in float64; each rank keeps its part alone."""
    settings = {"packed": packed, "reshard": reshard}
    task = task_of(ranks, shard_ranks, settings=settings)
    assert any(batch.filler for works in task.works for work in works for batch in work.micro_batches)
    found = together(task)
    check_equal_to_one(found, alone(task_of(1, 1, settings=settings)), 1e-10)
    assert all(one.digest == found[0].digest for one in found)
    assert [one.weights == {} for one in found] == [False] + [True] * (ranks - 1)
    kept = sum(one.parts for one in found)
    assert kept == found[0].whole * (ranks // shard_ranks)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"offload": True}, id="off-load"),
        pytest.param({"recompute": True, "packed": True}, id="recompute"),
        pytest.param({"share_prompts": True, "reshard": False}, id="share-prompts-whole"),
        pytest.param({"fused": True}, id="compiled", marks=pytest.mark.long),
    ],
)
def test_options_of_a_rank_work_with_shards(together: Together, settings: dict[str, Any]) -> None:
    """Two updates per batch, the policy's own log-probabilities, a reference that warms up, an untied head."""
    options: dict[str, Any] = {"decoupled": True, "steps": (1,), "settings": settings, "tied": False}
    found = together(task_of(2, 2, warm_up_steps=3, **options))
    one = alone(task_of(1, 1, warm_up_steps=3, **options))
    check_equal_to_one(found, one, 1e-10)
    assert [other.warm_up_loss for other in found] == pytest.approx([one.warm_up_loss] * 2, abs=1e-10)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("recompute", [False, True])
def test_shards_replay_the_experts_that_were_chosen_while_sampling(together: Together, recompute: bool) -> None:
    """Most ranks have tokens for some experts only; a mixture that chooses by itself has other gradients."""
    options: dict[str, Any] = {"experts": True, "steps": (1,)}
    settings = {"router_replay": True, "recompute": recompute}
    found, one = (
        together(task_of(2, 2, settings=settings, **options)),
        alone(task_of(1, 1, settings=settings, **options)),
    )
    check_equal_to_one(found, one, 1e-10)
    own = alone(task_of(1, 1, settings={"recompute": recompute}, **options)).gradients[0]
    routers = [name for name in own if name.endswith("mlp.gate.weight")]
    assert len(routers) == 3
    assert all((own[name][2] - one.gradients[0][name][2]).abs().max() > 1e-6 for name in routers)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("low", [False, True], ids=["autocast", "bf16_weights"])
def test_shards_compute_in_bfloat16_as_one_rank_does(together: Together, low: bool) -> None:
    """Gradients are sums in float32 of what passes in bfloat16 give; the published weights are bfloat16."""
    options: dict[str, Any] = {
        "settings": {"low_weights": low},
        "dtype": torch.float32,
        "compute_dtype": torch.bfloat16,
        "steps": (1,),
    }
    found, one = together(task_of(2, 2, **options)), alone(task_of(1, 1, **options))
    assert {value.dtype for value in found[0].weights.values()} == {torch.bfloat16}
    check_close(found[0].logprobs, one.logprobs, 1e-6)
    check_close(gradient(found, 0), gradient([one], 0), 1e-6)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param((2, 2), (4, 2), id="full-to-hybrid", marks=pytest.mark.long),
        pytest.param((4, 2), (1, 1), id="hybrid-to-none", marks=pytest.mark.long),
        pytest.param((1, 1), (4, 4), id="none-to-full"),
    ],
)
def test_a_state_is_continued_by_other_ranks_and_another_sharding(
    together: Together, tmp_path: Path, saved: tuple[int, int], loaded: tuple[int, int]
) -> None:
    """A step, a save, a load and two steps are three steps: weights, moments, step counts and the reference."""

    def ranks(task: Task) -> list[Found]:
        return together(task) if task.ranks > 1 else [alone(task)]

    folder = str(tmp_path / "state")
    options: dict[str, Any] = {"decoupled": True, "settings": {"offload": True}}
    whole = alone(task_of(1, 1, **options))
    first = ranks(task_of(*saved, **options, save=folder, save_after=3))  # After both updates of the first step.
    check_equal_to_one(first, whole, 1e-10)
    second = ranks(task_of(*loaded, **options, steps=(2, 3), load=folder))
    check_close(second[0].weights, whole.weights, 1e-10)
    for update in range(4):
        check_close(gradient(second, update), gradient([whole], update + 2), 1e-10)


@pytest.mark.timeout(120)
def test_ranks_that_loaded_different_models_are_refused(tmp_path: Path, warm_python: Any) -> None:
    """Once sharded nobody could tell."""
    point, task = MeetingPoint(), task_of(2, 2, steps=(1,))
    members = []
    for rank in range(2):
        (tmp_path / f"task-{rank}").write_bytes(pickle.dumps(replace(task, seed=rank)))
        words = ["-m", PROGRAM, str(rank), point.address, str(tmp_path / f"task-{rank}"), str(tmp_path / "found")]
        members.append(warm_python.start(tmp_path, *words))
    for member in members:
        _, err = member.communicate(timeout=100)
        assert member.returncode != 0
        assert "VersionError: rank1 does not hold the weights of rank0" in err
