"""A program of the tests: one of the ranks that train together, from a pickled task to what it found.

python -c "…; sharded_rank.main(rank, meeting, task, found)"
"""

import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from asyncrl.engine.aio.blocking import in_thread
from asyncrl.engine.data_plane.base import Partition
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.model.device import on_device
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.columns import (
    COLUMNS,
    LOGPROBS,
    REFERENCE_LOGPROBS,
    ROUTED_EXPERTS,
    TOKENS,
    TRAINER_LOGPROBS,
)
from asyncrl.engine.records.group import GROUP, VERSION
from asyncrl.engine.records.work import ForwardWork, TrainWork
from asyncrl.engine.weights.base import InProcess
from asyncrl.trainers.backends.sharded import Shards
from asyncrl.trainers.backends.torch_backend import TorchBackend
from asyncrl.trainers.backends.torch_settings import TorchSettings
from asyncrl.trainers.rank import RankSettings, TrainerRank
from asyncrl.trainers.reducer import Alone, Gloo

VOCABULARY, LAYERS, EXPERTS = 13, 3, 5
Rows = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Task:
    """What `ranks` ranks do, of which `shard_ranks` keep a model together (1: each has its own).

    `works` are by rank, in order; `rows` the ids and the sampler's log-probabilities of each sample, by key. A state is
    loaded before them, and saved after `save_after` of them. Warm-up steps come first. With `experts` the model is a
    mixture, and rows say which of its experts were chosen while sampling.
    """

    ranks: int
    shard_ranks: int
    settings: TorchSettings
    works: Sequence[Sequence[ForwardWork | TrainWork]]
    rows: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    dtype: torch.dtype = torch.float64
    compute_dtype: torch.dtype | None = None
    warm_up_steps: int = 0
    load: str | None = None
    save: str | None = None
    save_after: int = 0
    device: str = "cpu"
    tied: bool = True
    seed: int = 0
    experts: bool = False


@dataclass
class Found:
    """What a rank found: log-probabilities by key, results and gradients of steps, and at rank 0 the weights.

    Gradients are parts: by weight, where each begins, its whole shape and its values.
    """

    logprobs: dict[str, torch.Tensor] = field(default_factory=dict)
    results: list[Any] = field(default_factory=list)
    gradients: list[dict[str, tuple[Any, Any, torch.Tensor]]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    digest: dict[str, int] = field(default_factory=dict)
    warm_up_loss: float = 0.0
    parts: int = 0
    whole: int = 0


def tiny_model(dtype: torch.dtype, *, tied: bool, seed: int = 0, experts: bool = False) -> Any:
    """Three layers; 13 and 18 rows are no multiple of four. A Llama, or with `experts` a Mixtral."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 18,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": tied,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if experts:
            mixture = MixtralConfig(**sizes, num_local_experts=EXPERTS, num_experts_per_tok=2)
            # The grouped kernel does not know float64.
            mixture._experts_implementation = "eager"
            return MixtralForCausalLM(mixture).to(dtype).eval()
        return LlamaForCausalLM(LlamaConfig(**sizes)).to(dtype).eval()


class Recording(TorchBackend):
    """Keeps the summed gradients of each update."""

    def __init__(self, found: Found, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._found = found

    def apply(self, gradients: torch.Tensor, *, learning_rate: float) -> float:
        places = self.training_state().places
        masters = self._weights.masters
        parts = torch.split(gradients.cpu(), [master.numel() for master in masters.values()])
        seen = {}
        for (name, master), part in zip(masters.items(), parts, strict=True):
            place = places.get(f"weights/{name}")
            offsets, shape = ((0,) * master.ndim, master.shape) if place is None else (place.offsets, place.shape)
            seen[name] = offsets, tuple(shape), part.reshape(master.shape).clone()
        self._found.gradients.append(seen)
        return super().apply(gradients, learning_rate=learning_rate)


class Together(LocalPlane):
    """A plane per process; what one rank writes, all have."""

    async def write(self, partition: str, column: str, values: Any, *, writer: str) -> None:
        parts: list[Any] = [values]
        if dist.is_initialized():
            parts = [None] * dist.get_world_size()
            dist.all_gather_object(parts, values)
        for number, part in enumerate(parts):
            await super().write(partition, column, part, writer=f"{writer}-{number}")


async def run(rank: int, meeting: str, task: Task) -> Found:
    """Be one rank of the task."""
    found, device = Found(), torch.device(task.device, rank) if task.device == "cuda" else torch.device("cpu")
    reducer: Any = Alone()
    shards = None
    if task.ranks > 1:
        nccl = task.device == "cuda"
        reducer = Gloo(rank=rank, ranks=task.ranks, meeting=meeting, timeout_s=60.0, blocking=in_thread, nccl=nccl)
        await reducer.join()
        if task.shard_ranks > 1:
            shards = Shards(device, ranks=task.shard_ranks)
    model = tiny_model(task.dtype, tied=task.tied, seed=task.seed, experts=task.experts)
    backend = Recording(
        found,
        model if shards is not None else model.to(device),
        task.settings,
        pad_id=0,
        compute_dtype=task.compute_dtype,
        shards=shards,
    )
    member = TrainerRank(
        RankSettings(rank, task.ranks, "train", learning_rate=0.02, extras=_extras(task)),
        backend=backend,
        plane=await _plane(task),
        reducer=reducer,
        transport=InProcess(),
        blocking=on_device(in_thread, device),
    )
    if task.load is not None:
        await member.load_state(task.load)
    if task.warm_up_steps:
        examples = [([1 + i % 5, 2 + i % 7, 3, 1], 1 + i % 2) for i in range(3)]
        found.warm_up_loss = await member.warm_up(examples, steps=task.warm_up_steps, batch=1, learning_rate=0.01)
    for done, work in enumerate(task.works[rank], start=1):
        if isinstance(work, TrainWork):
            found.results.append(await member.train(work))
        else:
            await member.logprobs(work)
        if task.save is not None and done == task.save_after:
            await member.hold_state()
            await member.save_state(task.save)
    found.digest = await member.digest()
    if rank == 0:
        found.weights = dict((await member.weights()).content)
    elif shards is not None:
        await member.lend_weights()
    state = backend.training_state()
    found.parts = sum(value.numel() for name, value in state.saved.items() if name in state.places)
    found.whole = sum(torch.Size(place.shape).numel() for place in state.places.values())
    found.logprobs = await _written(member, task)
    return found


async def _plane(task: Task) -> LocalPlane:
    plane = Together()
    later = (TRAINER_LOGPROBS, REFERENCE_LOGPROBS)
    groups: dict[str, list[str]] = {}
    for key in task.rows:
        groups.setdefault(key.rpartition("_")[0], []).append(key)
    size = len(next(iter(groups.values())))
    await plane.register(Partition("train", size, (*COLUMNS, *_extras(task)), ("trainer",), later=later))
    for number, keys in enumerate(groups.values()):
        columns = {
            TOKENS: [task.rows[key][0] for key in keys],
            LOGPROBS: [task.rows[key][1] for key in keys],
        }
        if task.experts:
            columns[ROUTED_EXPERTS] = [_chosen(task.rows[key][0]) for key in keys]
        await plane.put("train", GroupMeta(tuple(keys), {VERSION: 0, GROUP: number}), columns)
    return plane


def _extras(task: Task) -> tuple[str, ...]:
    return (ROUTED_EXPERTS,) if task.experts else ()


def _chosen(ids: torch.Tensor) -> torch.Tensor:
    """Choose two experts per token and layer by its id and place, not as the router would."""
    first = (ids.long() + torch.arange(len(ids)))[:, None] + torch.arange(LAYERS)
    return torch.stack([first % EXPERTS, (first + 2) % EXPERTS], -1)


async def _written(member: TrainerRank, task: Task) -> dict[str, torch.Tensor]:
    """Return what the ranks wrote of log-probabilities under the policy, by key."""
    stages = [work for works in task.works for work in works if isinstance(work, ForwardWork) and not work.reference]
    keys = sorted({key for work in stages for key in work.samples})
    if not keys:
        return {}
    (values,) = (await member._plane.read("train", keys, (TRAINER_LOGPROBS,))).values()
    return dict(zip(keys, values, strict=True))


def main(rank: int, meeting: str, task: Path, found: Path) -> None:
    torch.set_num_threads(1)
    result = anyio.run(run, rank, meeting, pickle.loads(task.read_bytes()))
    found.write_bytes(pickle.dumps(result))
    if dist.is_initialized():
        # Its threads end before Python does, or the process may abort at its end.
        dist.destroy_process_group()


if __name__ == "__main__":
    # Under this name, what is unpickled and what is written are classes of `__main__`, which the tests do not have.
    from asyncrl.engine.testing.conformance import sharded_rank

    sharded_rank.main(int(sys.argv[1]), sys.argv[2], *map(Path, sys.argv[3:]))
