"""Extras from a task to the model of every rank: real collector, plan, ranks and backend around any plane."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import anyio
import torch
from torch import nn

from asyncrl.collectors.collector import Collector, CollectorSettings
from asyncrl.collectors.tasks import Reward
from asyncrl.engine.aio.blocking import in_place
from asyncrl.engine.data_plane.base import DataPlane, Partition
from asyncrl.engine.data_plane.passing import PassingPlane
from asyncrl.engine.model.tokenizer import CharTokenizer
from asyncrl.engine.records import Grant, GroupMeta, Plan, Prompt
from asyncrl.engine.records.columns import COLUMNS
from asyncrl.engine.records.message import PutNotice
from asyncrl.engine.records.work import SampleWork, TrainWork
from asyncrl.engine.simulate.virtual_loop import in_place_scorer
from asyncrl.engine.testing.fakes import FakeGenerator, FakeTask
from asyncrl.engine.weights.base import InProcess
from asyncrl.trainers.backends.torch_backend import TorchBackend
from asyncrl.trainers.backends.torch_settings import TorchSettings
from asyncrl.trainers.extras import extras_of
from asyncrl.trainers.fan_out import plan_batch
from asyncrl.trainers.loss.objective import Clip
from asyncrl.trainers.rank import RankSettings, TrainerRank
from asyncrl.trainers.reducer import Meeting

FEATURES = "features"
GROUPS, SIZE, RANKS = 5, 3, 2


def features_of(prompt: int, index: int) -> torch.Tensor:
    """Return the features of a sample: as many rows as its index and one more, each of prompt and index."""
    return torch.tensor([[prompt, index]] * (index + 1), dtype=torch.float32)


class SeeingTask(FakeTask):
    """Brings features with every reward; the last sample of prompt 1 fails to score."""

    extras = (FEATURES,)

    def __init__(self) -> None:
        super().__init__(GROUPS, self._seen)

    def _seen(self, prompt: int, index: int) -> Reward:
        if (prompt, index) == (1, SIZE - 1):
            raise ValueError("nothing to see")
        return Reward(float(index), extras={FEATURES: features_of(prompt, index)})


class SeeingModel(nn.Module):
    """Takes packed rows, and keeps the features that it was given with each, beside those that belong there."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CharTokenizer.vocab_size, CharTokenizer.vocab_size)
        self.given: list[torch.Tensor] = []
        self.expected: list[torch.Tensor] = []

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        features: torch.Tensor,
        use_cache: bool,
    ) -> Any:
        self.given.append(features)
        starts = (position_ids[0] == 0).nonzero().flatten().tolist()
        # A sample is `<prompt>>`, then the digit of its index, as often as its length says.
        texts = [CharTokenizer().decode(input_ids[0, at : at + 3].tolist()) for at in starts]
        self.expected.append(torch.cat([features_of(int(text[0]), int(text[2])) for text in texts]))
        return SimpleNamespace(logits=self.table(input_ids))


async def extras_reach_the_model_with_their_samples(plane: DataPlane) -> None:
    """Collect groups of a task with extras, plan them with fillers, and train them on two ranks, packed."""
    task, name = SeeingTask(), "extras"
    await plane.register(Partition(name, SIZE, (*COLUMNS, *task.extras, "note"), ("trainer",), ("note",)))
    groups = await _collect(_Noted(plane), name, task)
    lengths = {
        key: meta.prompt_tokens + tokens
        for meta in groups
        for key, tokens in zip(meta.keys, meta.response_tokens, strict=True)
        if tokens
    }
    assert len(lengths) == GROUPS * SIZE - 1
    # An update a sample, beside which the other rank runs a filler; then few micro-batches, of many samples.
    for updates, fillers in ((len(lengths), len(lengths)), (1, 0)):
        plan = plan_batch(lengths, ranks=RANKS, budget_tokens=30, updates=updates)
        assert sum(batch.filler for rank in plan.ranks for batch in rank) == fillers
        models = [SeeingModel() for _ in range(RANKS)]
        await _train(plane, name, plan, models, lengths)
        for model, batches in zip(models, plan.ranks, strict=True):
            assert len(model.given) == len(batches)
            for given, expected in zip(model.given, model.expected, strict=True):
                assert torch.equal(given, expected)
    await plane.clear(name, await plane.keys(name))


class _Noted(PassingPlane):
    """A plane that adds a column of objects to every put, which no rank can take."""

    async def put(self, partition: str, group: GroupMeta, columns: Mapping[str, Any]) -> GroupMeta:
        return await self._plane.put(partition, group, {**columns, "note": list(group.keys)})


async def _collect(plane: Any, partition: str, task: FakeTask) -> list[GroupMeta]:
    collector = Collector(
        "collector",
        CollectorSettings(partition, 1.0, 9, 30, 30, 30),
        generator=FakeGenerator(seconds=lambda _: 0.01, length=lambda call: 2 + call),
        scorer=in_place_scorer(task),
        tokenizer=CharTokenizer(),
        plane=plane,
        transport=InProcess(),
    )
    await collector.grant([Grant(n, Prompt(n, f"{n}>"), SIZE, 0) for n in range(GROUPS)])
    found: list[GroupMeta] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(collector.run)
        while len(found) < GROUPS:
            messages = [message for _, message in await collector.events(len(found), 30)]
            found += [message.group for message in messages if isinstance(message, PutNotice)]
        await collector.stop()
    return found


async def _train(
    plane: DataPlane, partition: str, plan: Plan, models: Sequence[SeeingModel], lengths: dict[str, int]
) -> None:
    meeting = Meeting(RANKS, 30)
    extras = extras_of(await plane.partition(partition))
    assert extras == [FEATURES]

    async def train(rank: int) -> None:
        settings = TorchSettings(1.0, Clip(low=0.2, high=0.2, dual=3.0), (0.9, 0.95), 0.0, 1.0, packed=True)
        member = TrainerRank(
            RankSettings(rank, RANKS, partition, learning_rate=0.0, extras=tuple(extras)),
            backend=TorchBackend(models[rank], settings, pad_id=0),
            plane=plane,
            reducer=meeting.member(rank),
            transport=InProcess(),
            blocking=in_place,
        )
        samples = {key: SampleWork(key, 2, tokens - 2, 1.0) for key, tokens in lengths.items()}
        work = TrainWork(1, plan.ranks[rank], samples, total_tokens=50)
        await member.train(work)

    async with anyio.create_task_group() as tasks:
        for rank in range(RANKS):
            tasks.start_soon(train, rank)
