"""What ranks do before the first step: load a checkpoint or warm up, and hold the same weights."""

from collections.abc import Sequence

import anyio
import structlog

from asyncrl.configs.sections.trainer import Trainer
from asyncrl.engine.deployment import Deployment, RankHandle
from asyncrl.engine.errors import Overdue
from asyncrl.engine.loop.saved import Saved
from asyncrl.engine.weights.digest import Digest, check_equal

log = structlog.get_logger()


async def load(deployment: Deployment, saved: Saved, *, limit_s: float) -> None:
    """Have every part of the trainer load its state; Overdue after `limit_s`."""
    try:
        with anyio.fail_after(limit_s):
            async with anyio.create_task_group() as loading:
                for rank in deployment.states:
                    loading.start_soon(rank.load_state, saved.trainer)
    except TimeoutError:
        raise Overdue(f"{saved.folder} was not loaded within {limit_s:g} s (checkpoint.timeout_s)") from None


async def warm_up(deployment: Deployment, trainer: Trainer) -> None:
    """Train supervised on the task's examples, on every rank alike."""

    async def warm(rank: RankHandle) -> None:
        loss = await rank.warm_up(
            deployment.examples,
            steps=trainer.sft_warm_up_steps,
            batch=trainer.sft_warm_up_batch,
            learning_rate=trainer.sft_warm_up_learning_rate,
        )
        log.info("warm-up done", rank=rank.name, loss=round(loss, 4))

    async with anyio.create_task_group() as warming:
        for rank in deployment.ranks:
            warming.start_soon(warm, rank)


async def compare_weights(ranks: Sequence[RankHandle]) -> None:
    """Raise VersionError if a rank holds other weights than rank 0, which are published."""
    digests: dict[str, Digest] = {}

    async def ask(rank: RankHandle) -> None:
        digests[rank.name] = await rank.digest()

    async with anyio.create_task_group() as asking:
        for rank in ranks:
            asking.start_soon(ask, rank)
    check_equal({rank.name: digests[rank.name] for rank in ranks})
