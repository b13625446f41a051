"""A small float64 model, a per-token reference loss, and whole steps of trainer ranks."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch
from torch import nn

from asyncrl.configs import load_config
from asyncrl.engine.aio.blocking import in_place
from asyncrl.engine.aio.virtual_time import run_virtual
from asyncrl.engine.data_plane.base import Partition
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.loop.selection import Selection
from asyncrl.engine.loop.stages import Stages
from asyncrl.engine.model.causal_lm import build_model
from asyncrl.engine.records import GroupMeta, MicroBatch, Plan
from asyncrl.engine.records.columns import COLUMNS, LOGPROBS, REFERENCE_LOGPROBS, TOKENS, TRAINER_LOGPROBS
from asyncrl.engine.records.generated import write_generated
from asyncrl.engine.records.group import GROUP, VERSION
from asyncrl.engine.records.keys import sample_keys
from asyncrl.engine.records.work import ForwardWork, RankResult, SampleWork, TrainWork
from asyncrl.engine.testing.simulation import simulated_config
from asyncrl.engine.weights.base import InProcess
from asyncrl.trainers.backends.torch_backend import TorchBackend
from asyncrl.trainers.backends.torch_settings import TorchSettings
from asyncrl.trainers.fan_out import plan_batch
from asyncrl.trainers.loss.objective import MAX_LOG_RATIO, Clip
from asyncrl.trainers.rank import RankSettings, TrainerRank
from asyncrl.trainers.reducer import Meeting, Reducer

CLIP = Clip(low=0.2, high=0.3, dual=3.0)
VOCABULARY = 12


class CausalMean(nn.Module):
    """Next-token logits from the mean of the embeddings so far; float64, so that 1e-12 means something."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embed = nn.Embedding(VOCABULARY, 6, dtype=torch.float64)
            self.hidden = nn.Linear(6, 6, dtype=torch.float64)
            self.out = nn.Linear(6, VOCABULARY, dtype=torch.float64)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, use_cache: bool) -> Any:
        total = self.embed(input_ids).cumsum(1)
        mean = total / torch.arange(1, input_ids.shape[1] + 1).unsqueeze(-1)
        return SimpleNamespace(logits=self.out(torch.tanh(self.hidden(mean))))


@dataclass(frozen=True)
class Sample:
    """One sample; `gap` is how far the policy's log-probabilities are above the behaviour's.

    The first `withheld` tokens of the response are too old to be trained on; of the others only those in the places
    `generated`, if it has any.
    """

    ids: tuple[int, ...]
    prompt: int
    advantage: float
    gap: float = 0.0
    withheld: int = 0
    generated: tuple[tuple[int, int], ...] = ()

    @property
    def trained(self) -> list[int]:
        """Which tokens of the response are trained."""
        response = range(len(self.ids) - self.prompt)
        places = self.generated or ((0, len(self.ids)),)
        return [t for t in response if t >= self.withheld and any(first <= t < end for first, end in places)]


@dataclass
class StepOutcome:
    """What a step of all ranks gave: their results, the summed gradient and each rank's weights."""

    results: list[RankResult]
    gradient: torch.Tensor
    weights: list[dict[str, torch.Tensor]]

    @property
    def loss(self) -> float:
        return sum(result.loss for result in self.results)


@dataclass
class Recording:
    """A reducer that keeps what the ranks' sum was."""

    inner: Reducer
    sums: list[torch.Tensor] = field(default_factory=list)

    async def sum(self, values: torch.Tensor) -> torch.Tensor:
        total = await self.inner.sum(values)
        self.sums.append(total.clone())
        return total


def response_logprobs(model: Any, sample: Sample, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of a sample's response, one unpadded row at a time, without the shift's arithmetic."""
    with torch.no_grad():
        ids = torch.tensor([sample.ids])
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
    table = torch.log_softmax(logits / temperature, -1)
    return torch.stack(
        [table[t - 1, sample.ids[t]] for t in range(sample.prompt, len(sample.ids))] or [table.new_zeros(())]
    )[: len(sample.ids) - sample.prompt]


def backend_of(model: Any, **changes: Any) -> TorchBackend:
    compute_dtype = changes.pop("compute_dtype", None)
    settings = replace(TorchSettings(1.0, CLIP, (0.9, 0.95), 0.0, 1.0), **changes)
    return TorchBackend(model, settings, pad_id=0, compute_dtype=compute_dtype)


def sample_work(key: str, sample: Sample) -> SampleWork:
    return SampleWork(
        key,
        sample.prompt,
        len(sample.trained),
        sample.advantage,
        sample.withheld,
        generated=write_generated(sample.generated) if sample.generated else "",
    )


def train_samples(
    model: Any,
    samples: Sequence[Sample],
    *,
    ranks: int = 1,
    budget: int = 1000,
    plan: Callable[[Mapping[str, int]], Plan] | None = None,
    temperature: float = 1.0,
) -> StepOutcome:
    """Put `samples`, plan them, and run one step of `ranks` copies of `model`."""
    keys = sample_keys(0, 0, len(samples))
    behaviour = [response_logprobs(model, sample, temperature) - sample.gap for sample in samples]
    lengths = {key: len(sample.ids) for key, sample in zip(keys, samples, strict=True)}
    planned = plan(lengths) if plan else plan_batch(lengths, ranks=ranks, budget_tokens=budget)

    async def main() -> StepOutcome:
        plane = LocalPlane()
        await plane.register(Partition("train", len(samples), COLUMNS, ("trainer",)))
        columns = {TOKENS: [torch.tensor(sample.ids, dtype=torch.int32) for sample in samples], LOGPROBS: behaviour}
        await plane.put("train", GroupMeta(keys, {VERSION: 0, GROUP: 0}), columns)
        meeting = Meeting(ranks, 60.0)
        reducers = [Recording(meeting.member(rank)) for rank in range(ranks)]
        models = [copy.deepcopy(model) for _ in range(ranks)]
        members = [
            TrainerRank(
                RankSettings(rank, ranks, "train", learning_rate=1e-3),
                backend=backend_of(models[rank], temperature=temperature),
                plane=plane,
                reducer=reducers[rank],
                transport=InProcess(),
                blocking=in_place,
            )
            for rank in range(ranks)
        ]
        results: dict[int, RankResult] = {}

        async def train(rank: int) -> None:
            work = TrainWork(
                step=1,
                micro_batches=planned.ranks[rank],
                samples={key: sample_work(key, sample) for key, sample in zip(keys, samples, strict=True)},
                total_tokens=sum(len(sample.trained) for sample in samples),
            )
            results[rank] = await members[rank].train(work)

        async with anyio.create_task_group() as tasks:
            for rank in range(ranks):
                tasks.start_soon(train, rank)
        return StepOutcome(
            [results[rank] for rank in range(ranks)], reducers[0].sums[0], [m.state_dict() for m in models]
        )

    return run_virtual(main)


def reference_token(logprob: float, behaviour: float, advantage: float, clip: Clip) -> tuple[float, float, bool, float]:
    """Loss, ratio, outside the clip or not, and k3, of one token in plain Python floats."""
    gap = min(max(logprob - behaviour, -MAX_LOG_RATIO), MAX_LOG_RATIO)
    ratio = math.exp(gap)
    bounded = min(max(ratio, 1 - clip.low), 1 + clip.high)
    gain = min(ratio * advantage, bounded * advantage)
    if advantage < 0:
        gain = max(gain, clip.dual * advantage)
    return -gain, ratio, not 1 - clip.low <= ratio <= 1 + clip.high, ratio - 1 - gap


@dataclass
class BatchOutcome:
    """What the stages of one batch gave, by the driver's stages on real ranks; `columns` are by key.

    `forward` is what each rank was given to measure.
    """

    samples: dict[str, Sample]
    behaviour: dict[str, torch.Tensor]
    forward: list[tuple[MicroBatch, ...]]
    plan: Plan
    gaps: dict[str, tuple[float, float]]
    results: list[RankResult]
    columns: dict[str, dict[str, torch.Tensor]]
    weights: list[dict[str, torch.Tensor]]
    reads: list[tuple[str, ...]]


class ListeningRank(TrainerRank):
    """Keeps its part of forward-only plans."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.measured: tuple[MicroBatch, ...] = ()

    async def logprobs(self, work: ForwardWork) -> dict[str, tuple[float, float]]:
        self.measured = work.micro_batches
        return await super().logprobs(work)


class CountingPlane(LocalPlane):
    """Keeps the keys of every read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[str, ...]] = []

    async def read(self, partition: str, keys: Sequence[str], columns: Sequence[str]) -> dict[str, list[Any]]:
        self.reads.append(tuple(keys))
        return await super().read(partition, keys, columns)


def train_batch(
    model: Any,
    samples: Sequence[Sample],
    *,
    drift: float = 0.0,
    group_size: int = 3,
    make: Callable[..., Any] | None = None,
    hide_not_generated: bool = False,
    **trainer: Any,
) -> BatchOutcome:
    """Run all stages that `trainer`, options of that section, ask for.

    The policy starts `drift` away from the reference, in every weight. `make` stands in for the backend. With
    `hide_not_generated` the behaviour's log-probability of tokens outside a sample's places is 0.
    """
    config = simulated_config(
        trainer__learning_rate=1e-3,
        trainer__beta1=0.9,
        trainer__beta2=0.95,
        rollout__group_size=max(2, group_size),
        **{f"trainer__{name}": value for name, value in trainer.items()},
    )
    options = config.trainer
    rows = [sample_keys(0, group, group_size) for group in range(-(-len(samples) // group_size))]
    by_key = dict(zip((key for row in rows for key in row), samples, strict=True))
    behaviour = {key: response_logprobs(model, sample) - sample.gap for key, sample in by_key.items()}
    for key, sample in by_key.items() if hide_not_generated else ():
        outside = [t for t in range(len(behaviour[key])) if t >= sample.withheld and t not in sample.trained]
        behaviour[key][outside] = 0.0
    selection = Selection(
        samples={key: sample_work(key, sample) for key, sample in by_key.items()},
        lengths={key: len(sample.ids) for key, sample in by_key.items()},
        ages=dict.fromkeys(by_key, 0),
        masks={},
        reward_sum=0.0,
    )

    async def main() -> BatchOutcome:
        plane = CountingPlane()
        await plane.register(Partition("train", group_size, COLUMNS, ("trainer",)))
        for group, keys in enumerate(rows):
            tokens = [torch.tensor(by_key[key].ids, dtype=torch.int32) for key in keys]
            columns = {TOKENS: tokens, LOGPROBS: [behaviour[key] for key in keys]}
            await plane.put("train", GroupMeta(keys, {VERSION: 0, GROUP: group}), columns)
        meeting = Meeting(options.ranks, 60.0)
        models = [copy.deepcopy(model) for _ in range(options.ranks)]
        members = []
        for rank in range(options.ranks):
            backend = (make or backend_of)(
                models[rank],
                packed=options.packs,
                importance_cap=options.importance_cap,
                reference_kl=options.reference_kl,
                align=options.align,
            )
            with torch.no_grad():
                for parameter in models[rank].parameters():
                    parameter.add_(drift)
            members.append(
                ListeningRank(
                    RankSettings(rank, options.ranks, "train", learning_rate=options.learning_rate),
                    backend=backend,
                    plane=plane,
                    reducer=meeting.member(rank),
                    transport=InProcess(),
                    blocking=in_place,
                )
            )
        stages = Stages(config, ranks=members, cost=None)
        gaps = await stages.logprobs(selection, step=1, write=True) if options.decoupled else {}
        if options.reference_kl:
            await stages.reference_logprobs(selection, step=1)
        plan = stages.plan(selection)
        plane.reads.clear()
        results = await stages.train(plan, selection, step=1)
        reads = list(plane.reads)
        later = (TRAINER_LOGPROBS,) * options.decoupled + (REFERENCE_LOGPROBS,) * (options.reference_kl > 0)
        found = await plane.read("train", list(by_key), later) if later else {}
        return BatchOutcome(
            by_key,
            behaviour,
            [member.measured for member in members],
            plan,
            gaps,
            results,
            {name: dict(zip(by_key, values, strict=True)) for name, values in found.items()},
            [m.state_dict() for m in models],
            reads,
        )

    return run_virtual(main)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def causal_mean() -> CausalMean:
    return CausalMean()


@pytest.fixture(scope="session")
def small_llama() -> Any:
    """A Llama in float64, with attention, positions and masks; not to be changed."""
    shape = load_config(
        "default", {"model": {"hidden_size": 16, "layers": 1, "heads": 2, "intermediate_size": 24}}
    ).model
    return build_model(shape, vocab_size=VOCABULARY, seed=3).double()


@pytest.fixture
def make_sample() -> type[Sample]:
    return Sample


@pytest.fixture
def make_backend() -> Callable[..., TorchBackend]:
    return backend_of


@pytest.fixture
def train_step() -> Callable[..., StepOutcome]:
    return train_samples


@pytest.fixture
def run_batch() -> Callable[..., BatchOutcome]:
    return train_batch


@pytest.fixture
def logprobs_of() -> Callable[..., torch.Tensor]:
    return response_logprobs


@pytest.fixture
def per_token() -> Callable[[float, float, float, Clip], tuple[float, float, bool, float]]:
    return reference_token


@pytest.fixture
def varied() -> list[Sample]:
    """Nine samples of unequal lengths, advantages of both signs, ratios inside and outside the clip."""
    rng = torch.Generator().manual_seed(5)
    out = []
    for i in range(9):
        prompt = 1 + i % 3
        response = 1 + (5 * i) % 7
        ids = tuple(torch.randint(1, VOCABULARY, (prompt + response,), generator=rng).tolist())
        out.append(Sample(ids, prompt, advantage=(-1.0) ** i * (0.3 + 0.2 * i), gap=(-0.5, 0.0, 0.1, 0.6, 1.5)[i % 5]))
    return out
