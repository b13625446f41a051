"""What a rank shares with others: sums with those that hold its part of other replicas, rows with its siblings."""

from dataclasses import dataclass, field
from typing import Any

from asyncrl.configs.sections.trainer import Trainer
from asyncrl.engine.aio.blocking import Blocking
from asyncrl.trainers.backends.sharded import Shards
from asyncrl.trainers.parallel import Parallel
from asyncrl.trainers.reducer import Alone, Gloo, Reducer
from asyncrl.trainers.siblings import GlooSiblings, OnlyChild, Siblings


@dataclass(frozen=True, slots=True)
class Links:
    reducer: Reducer = field(default_factory=Alone)
    siblings: Siblings = field(default_factory=OnlyChild)
    shards: Shards | None = None


async def meet(trainer: Trainer, rank: int, *, meeting: str, nccl: bool, blocking: Blocking[Any]) -> Links:
    """Have this process, of the rank, meet those of all others at the address of a MeetingPoint; return its links.

    With `nccl` tensors on GPUs are summed by NCCL.
    """
    parallel, timeout_s = Parallel.of(trainer), trainer.step_timeout_s
    if parallel.ranks == 1 and trainer.backend == "torch":  # Megatron has groups of its own, also on one rank.
        return Links()
    gloo = Gloo(
        rank=rank,
        ranks=parallel.ranks,
        meeting=meeting,
        timeout_s=timeout_s,
        blocking=blocking,
        nccl=nccl,
        peers=parallel.peers(rank),
    )
    await gloo.join()
    own = parallel.siblings(rank)
    if len(own) == 1:
        return Links(gloo)
    siblings: Siblings = await blocking(lambda: GlooSiblings(own, timeout_s=timeout_s, blocking=blocking))
    return Links(gloo, siblings)
