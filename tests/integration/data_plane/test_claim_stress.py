"""Claims on TransferQueue under four claimers, of which one dies holding some."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import pytest
import ray
from anyio.from_thread import BlockingPortal

from asyncrl.engine.data_plane.base import Consumption
from asyncrl.engine.data_plane.tq import TransferQueuePlane
from asyncrl.engine.testing.conformance.plane_actors import ClaimerActor
from asyncrl.engine.testing.conformance.plane_contract import contract_partition

GROUPS = 2000
PARTITION = "stress"


@pytest.mark.timeout(240)
def test_four_claimers_lose_nothing_and_repeat_nothing_though_one_dies(
    portal: BlockingPortal, ray_plane: TransferQueuePlane, record_testsuite_property: Callable[[str, Any], None]
) -> None:
    """Invariants 4 and 5."""
    portal.call(ray_plane.register, contract_partition(PARTITION))

    async def main() -> None:
        actors = [ray.remote(ClaimerActor).options(num_cpus=0).remote() for _ in range(4)]
        async with anyio.create_task_group() as tasks:
            for actor in actors:
                tasks.start_soon(_get, partial(actor.connect.remote, deadline_s=60))
        async with anyio.create_task_group() as tasks:
            for first, actor in enumerate(actors):
                tasks.start_soon(_get, partial(actor.put.remote, PARTITION, range(first, GROUPS, 4)))
        assert await ray_plane.consumption(PARTITION, "trainer") == Consumption(ready=GROUPS, claimed=0)
        victim, *others = actors
        grabbing = victim.grab.remote(PARTITION, "victim", 8)
        work = [
            actor.settle_until.remote(PARTITION, f"owner{number}", GROUPS, 16) for number, actor in enumerate(others)
        ]
        await anyio.sleep(1)
        ray.kill(victim, no_restart=True)
        with pytest.raises(ray.exceptions.RayActorError):
            await grabbing
        reaped = await ray_plane.reap(PARTITION, ["victim"])
        reports = [await report for report in work]
        settled = Counter(number for report in reports for number in report["settled"])
        assert len(reaped) >= 8
        assert settled == Counter(range(GROUPS))
        assert await ray_plane.keys(PARTITION) == []
        record_testsuite_property("groups_per_s", round(GROUPS / max(report["claim_s"] for report in reports)))
        for actor in others:
            ray.kill(actor)

    portal.call(main)


async def _get(call: Callable[[], Any]) -> None:
    await call()
