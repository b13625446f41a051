"""Siblings hold one replica together: one reads for all, one writes, and a batch is the same as without them.

Whole replicas stand in for parts of one: each sibling computes what the leader does.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
import torch

from asyncrl.engine.aio.blocking import in_place
from asyncrl.engine.aio.virtual_time import run_virtual
from asyncrl.engine.data_plane.base import Partition
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.errors import AsyncRLError, MissingRows
from asyncrl.engine.lifecycle.replica import Replica
from asyncrl.engine.loop.selection import Selection
from asyncrl.engine.loop.stages import Stages
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.columns import COLUMNS, LOGPROBS, TOKENS, TRAINER_LOGPROBS
from asyncrl.engine.records.group import GROUP, VERSION
from asyncrl.engine.records.keys import sample_keys
from asyncrl.engine.records.work import RankResult, SampleWork
from asyncrl.engine.testing.simulation import simulated_config
from asyncrl.engine.weights.base import InProcess
from asyncrl.trainers.backends.base import DeviceSums, Rows
from asyncrl.trainers.parallel import Parallel
from asyncrl.trainers.rank import RankSettings, TrainerRank
from asyncrl.trainers.reducer import Meeting


class Post:
    """Hands what a leader sends to its followers, in order."""

    def __init__(self, count: int) -> None:
        self.boxes = [anyio.create_memory_object_stream[torch.Tensor](100) for _ in range(count)]


class InProcessSiblings:
    def __init__(self, post: Post, index: int) -> None:
        self.index, self.count, self._post = index, len(post.boxes), post

    async def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        if self.index == 0:
            for box, _ in self._post.boxes[1:]:
                box.send_nowait(values.clone())
            return values
        return values.copy_(await self._post.boxes[self.index][1].receive())


@dataclass
class Noting(LocalPlane):
    """Notes who writes which columns, and how often rows are read."""

    writes: list[tuple[str, str]] = field(default_factory=list)
    reads: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    async def read(self, partition: str, keys: Sequence[str], columns: Sequence[str]) -> dict[str, list[Any]]:
        self.reads += 1
        return await super().read(partition, keys, columns)

    async def write(self, partition: str, column: str, values: Mapping[str, Any], *, writer: str) -> None:
        self.writes.append((writer, column))
        await super().write(partition, column, values, writer=writer)


class CountingBackend:
    """Passes all on, and counts how often weights are gathered."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.gathered = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def state(self) -> Any:
        self.gathered += 1
        return self._inner.state()

    def buckets(self) -> Any:
        self.gathered += 1
        return self._inner.buckets()


@dataclass
class Family:
    """All ranks of a run with whole replicas in place of parts."""

    parallel: Parallel
    plane: Noting
    members: list[TrainerRank]
    backends: list[CountingBackend]
    models: list[Any]

    @property
    def replicas(self) -> list[Any]:
        parallel, members = self.parallel, self.members
        return [
            Replica([members[rank] for rank in parallel.replica(i)], [members[rank] for rank in parallel.experts(i)])
            for i in range(parallel.data)
        ]


def family(model: Any, parallel: Parallel, plane: Noting, make: Callable[..., Any], *, policy: Any = "auto") -> Family:
    """Make one rank for each place."""
    posts = [Post(parallel.tensor * parallel.pipeline) for _ in range(parallel.data)]
    parts = [Meeting(parallel.data, 60.0) for _ in range(parallel.tensor * parallel.pipeline)]
    models = [copy.deepcopy(model) for _ in range(parallel.ranks)]
    backends = [CountingBackend(make(one)) for one in models]
    members = []
    for rank in range(parallel.ranks):
        data, at = parallel.place(rank).data, parallel.siblings(rank).index(rank)
        settings = RankSettings(
            rank, parallel.ranks, "train", learning_rate=1e-3, fetch_policy=policy, parallel=parallel
        )
        members.append(
            TrainerRank(
                settings,
                backend=backends[rank],
                plane=plane,
                reducer=parts[at].member(data),
                transport=InProcess(),
                blocking=in_place,
                siblings=InProcessSiblings(posts[data], at),
            )
        )
    return Family(parallel, plane, members, backends, models)


@dataclass
class Outcome:
    made: Family
    results: list[RankResult]
    gaps: dict[str, tuple[float, float]]
    weights: list[dict[str, torch.Tensor]]


def run_batch(
    model: Any, samples: Sequence[Any], parallel: Parallel, make: Callable[..., Any], **changes: Any
) -> Outcome:
    """Measure and train one batch on all ranks by the driver's own stages."""
    policy = changes.pop("policy", "auto")
    trainer = {"ranks": parallel.ranks, "tensor_parallel": parallel.tensor, "pipeline_parallel": parallel.pipeline}
    config = simulated_config(rollout__group_size=3, trainer__recompute_logprobs=True)
    options = config.trainer.model_copy(update={**trainer, "expert_parallel": parallel.expert, **changes})
    config = config.model_copy(update={"trainer": options})
    rows = [sample_keys(0, group, 3) for group in range(len(samples) // 3)]
    by_key = dict(zip((key for row in rows for key in row), samples, strict=True))
    selection = Selection(
        samples={
            key: SampleWork(key, one.prompt, len(one.trained), one.advantage, one.withheld)
            for key, one in by_key.items()
        },
        lengths={key: len(one.ids) for key, one in by_key.items()},
        ages=dict.fromkeys(by_key, 0),
        masks={},
        reward_sum=0.0,
    )

    async def main() -> Outcome:
        plane = Noting()
        await plane.register(Partition("train", 3, COLUMNS, ("trainer",), later=(TRAINER_LOGPROBS,)))
        for group, keys in enumerate(rows):
            tokens = [torch.tensor(by_key[key].ids, dtype=torch.int32) for key in keys]
            logprobs = [torch.full((len(by_key[key].ids) - by_key[key].prompt,), -2.0) for key in keys]
            meta = GroupMeta(keys, {VERSION: 0, GROUP: group})
            await plane.put("train", meta, {TOKENS: tokens, LOGPROBS: logprobs})
        made = family(model, parallel, plane, make, policy=policy)
        stages = Stages(config, ranks=made.replicas, cost=None)
        gaps = await stages.logprobs(selection, step=1, write=True)
        results = await stages.train(stages.plan(selection), selection, step=1)
        return Outcome(made, results, gaps, [one.state_dict() for one in made.models])

    return run_virtual(main)


@pytest.mark.parametrize("shape", [(2, 2, 1), (2, 1, 2), (4, 2, 1), (8, 2, 2)], ids=["TP 2", "PP 2", "DP2 TP2", "all"])
def test_a_batch_is_that_of_the_replicas_alone_bit_by_bit(
    shape: tuple[int, int, int], causal_mean: Any, varied: Any, make_backend: Callable[..., Any]
) -> None:
    """Figures count once, whoever else computed them; all siblings hold equal weights."""
    parallel = Parallel(*shape)
    together = run_batch(causal_mean, varied, parallel, make_backend)
    alone = run_batch(causal_mean, varied, Parallel(parallel.data), make_backend)
    assert len(together.results) == parallel.data
    for ours, theirs in zip(together.results, alone.results, strict=True):
        assert (ours.tokens, ours.loss, ours.grad_norm) == (theirs.tokens, theirs.loss, theirs.grad_norm)
    assert together.gaps == alone.gaps
    for weights in together.weights:
        for name, value in weights.items():
            assert torch.equal(value, alone.weights[0][name])
    assert together.made.plane.reads == alone.made.plane.reads


@pytest.mark.parametrize(("peaks", "whole"), [((2.0, 3.0), 5.0), ((2.0, 0.0), 0.0)])
def test_the_peak_is_of_all_siblings_devices(peaks: tuple[float, float], whole: float) -> None:
    class Peaked:
        def __init__(self, peak: float) -> None:
            self.name, self.peak = f"rank{peak}", peak

        async def train(self, work: Any) -> RankResult:
            return RankResult(1.0, 1.0, 0, 0.0, 1, 1.0, peak_flops=self.peak)

    members: Any = [Peaked(peak) for peak in peaks]
    work: Any = None
    assert run_virtual(lambda: Replica(members).train(work)).peak_flops == whole


def test_the_leader_alone_writes_a_column_back(causal_mean: Any, varied: Any, make_backend: Callable[..., Any]) -> None:
    outcome = run_batch(causal_mean, varied, Parallel(4, tensor=2), make_backend)
    assert sorted(outcome.made.plane.writes) == [("rank0", TRAINER_LOGPROBS), ("rank2", TRAINER_LOGPROBS)]


def test_independent_siblings_read_each_for_itself(
    causal_mean: Any, varied: Any, make_backend: Callable[..., Any]
) -> None:
    together = run_batch(causal_mean, varied, Parallel(2, tensor=2), make_backend, policy="independent")
    leader = run_batch(causal_mean, varied, Parallel(2, tensor=2), make_backend)
    assert together.made.plane.reads == 2 * leader.made.plane.reads
    assert torch.equal(together.weights[1]["out.weight"], leader.weights[0]["out.weight"])


def test_replicas_that_share_experts_measure_in_step(
    causal_mean: Any, varied: Any, make_backend: Callable[..., Any]
) -> None:
    """Each forward pass of one waits for the others', so all take as many, fillers included."""

    class Counts(CountingBackend):
        passes = 0

        def logprobs(self, rows: Rows, *, reference: bool = False) -> Any:
            self.passes += 1
            return self._inner.logprobs(rows, reference=reference)

    counted: list[Counts] = []

    def make(model: Any) -> Counts:
        counted.append(Counts(make_backend(model)))
        return counted[-1]

    samples = varied[1:4]  # Of 8, 7 and 3 tokens: one is a micro-batch.
    outcome = run_batch(causal_mean, samples, Parallel(2, expert=2), make, forward_tokens=8, micro_batch_tokens=8)
    assert len(outcome.gaps) == 3
    assert [one.passes for one in counted] == [2, 2]


def test_the_weights_are_gathered_by_all_and_told_by_one(causal_mean: Any, make_backend: Callable[..., Any]) -> None:
    async def main() -> None:
        made = family(causal_mean, Parallel(4, tensor=2), Noting(), make_backend)
        first, second = made.replicas
        sent = await first.weights()
        offer = await first.offer(sent, ["collector0"])
        assert torch.equal(offer.content["out.weight"], causal_mean.out.weight)
        assert [one.gathered for one in made.backends] == [1, 1, 0, 0]
        assert await first.digest() == await second.digest()
        assert [one.gathered for one in made.backends] == [2, 2, 1, 1]
        assert await first.hold_weights() == 0
        await first.copy_weights(InProcess())
        assert [one.gathered for one in made.backends] == [4, 4, 1, 1]

    run_virtual(main)


def test_replicas_that_share_experts_lend_them(causal_mean: Any, make_backend: Callable[..., Any]) -> None:
    async def main() -> None:
        made = family(causal_mean, Parallel(8, tensor=2, expert=2), Noting(), make_backend)
        await made.replicas[0].weights()
        assert [one.gathered for one in made.backends] == [1, 1, 1, 1, 0, 0, 0, 0]
        for replica in made.replicas:
            await replica.digest()
        assert [one.gathered for one in made.backends] == [2, 2, 2, 2, 1, 1, 1, 1]

    run_virtual(main)


def test_a_warm_up_has_each_example_once(causal_mean: Any, make_backend: Callable[..., Any]) -> None:
    """Examples are dealt to replicas, not to ranks."""
    examples = [([1, 2, 3, 4], 2), ([5, 6, 7], 1), ([8, 9], 1), ([1, 3, 5, 7], 3)]

    async def warm(parallel: Parallel) -> tuple[list[float], torch.Tensor]:
        made = family(causal_mean, parallel, Noting(), make_backend)
        losses: list[float] = []

        async def one(replica: Any) -> None:
            losses.append(await replica.warm_up(examples, steps=2, batch=3, learning_rate=0.01))

        async with anyio.create_task_group() as tasks:
            for replica in made.replicas:
                tasks.start_soon(one, replica)
        return losses, made.models[-1].out.weight.detach()

    together, alone = run_virtual(lambda: warm(Parallel(4, tensor=2))), run_virtual(lambda: warm(Parallel(2)))
    assert together[0] == alone[0]
    assert torch.equal(together[1], alone[1])


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_the_error_of_any_sibling_ends_the_step(
    failing: int, causal_mean: Any, varied: Any, make_backend: Callable[..., Any]
) -> None:
    class Fails(CountingBackend):
        def accumulate(self, rows: Rows, total_tokens: int) -> DeviceSums:
            raise AsyncRLError("no memory is left")

    made: list[Any] = []

    def make(model: Any) -> Any:
        made.append((Fails if len(made) == failing else CountingBackend)(make_backend(model)))
        return made[-1]

    with pytest.raises(BaseExceptionGroup) as caught:
        run_batch(causal_mean, varied, Parallel(4, tensor=2), make)
    assert caught.group_contains(AsyncRLError, match="no memory is left", depth=1)


def test_a_row_that_is_missing_is_told_by_all(causal_mean: Any, make_backend: Callable[..., Any]) -> None:
    from asyncrl.engine.records import MicroBatch
    from asyncrl.engine.records.work import TrainWork

    async def main() -> None:
        plane = Noting()
        await plane.register(Partition("train", 3, COLUMNS, ("trainer",)))
        (replica,) = family(causal_mean, Parallel(2, tensor=2), plane, make_backend).replicas
        key = "v9_p9_g9"
        work = TrainWork(1, (MicroBatch((key,), 3, False, 1.0),), {key: SampleWork(key, 1, 2, 1.0)}, 2)
        with pytest.raises(MissingRows, match=key):
            await replica.train(work)

    run_virtual(main)
