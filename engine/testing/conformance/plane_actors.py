"""Ray actors for tests: each attaches to the session's TransferQueue, as a collector or rank does."""

import time
from collections.abc import Sequence
from typing import Any

import anyio

from asyncrl.collectors.collector import Collector, CollectorSettings
from asyncrl.engine.data_plane.tq import TransferQueuePlane
from asyncrl.engine.model.tokenizer import CharTokenizer
from asyncrl.engine.simulate.virtual_loop import in_place_scorer
from asyncrl.engine.testing.conformance.plane_contract import claim_groups, contract_columns, contract_group
from asyncrl.engine.testing.fakes import FakeGenerator, FakeTask
from asyncrl.engine.weights.base import InProcess


class PlaneActor:
    """Holds an attached plane; `call` runs any of its operations here."""

    def __init__(self) -> None:
        self._served: Any = None

    async def connect(self, *, deadline_s: float) -> None:
        self.plane = await TransferQueuePlane.attach(deadline_s=deadline_s, start_s=60)
        self._served = self.plane

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self._served, method)(*args, **kwargs)


class CollectorActor(PlaneActor):
    """A real Collector around a fake generator; rewards by prompt id and sample index."""

    async def collect(self, partition: str, rewards: Sequence[Sequence[float]]) -> None:
        """Build the collector; `call` reaches it from now on."""
        self._served = Collector(
            "collector",
            CollectorSettings(partition, 1.0, 4, 30, 30, 30),
            generator=FakeGenerator(seconds=lambda _: 0.01),
            scorer=in_place_scorer(FakeTask(len(rewards), lambda prompt, index: rewards[prompt][index])),
            tokenizer=CharTokenizer(),
            plane=self.plane,
            transport=InProcess(),
        )


class ClaimerActor(PlaneActor):
    """A producer and a claimer of contract groups."""

    async def put(self, partition: str, numbers: Sequence[int]) -> None:
        """Put groups, eight at a time."""
        limit = anyio.CapacityLimiter(8)

        async def put_one(number: int) -> None:
            async with limit:
                group = contract_group(number, version=number % 3)
                await self.plane.put(partition, group, contract_columns(group))

        async with anyio.create_task_group() as tasks:
            for number in numbers:
                tasks.start_soon(put_one, number)

    async def settle_until(self, partition: str, owner: str, total: int, groups_per_claim: int) -> dict[str, Any]:
        """Claim and clear until nothing is ready or claimed of `total` groups; return what was settled and when."""
        settled: list[int] = []
        claim_s = 0.0
        while True:
            start = time.perf_counter()
            claim = await claim_groups(self.plane, partition, groups_per_claim, owner=owner)
            if claim.groups:
                claim_s += time.perf_counter() - start
                await self.plane.clear(partition, [k for g in claim.groups for k in g.keys], lease=claim.lease)
                settled.extend(group.group for group in claim.groups)
                continue
            counts = await self.plane.consumption(partition, "trainer")
            if counts.ready + counts.claimed == 0:
                return {"settled": settled, "claim_s": claim_s}
            await anyio.sleep(0.02)

    async def grab(self, partition: str, owner: str, groups_per_claim: int) -> None:
        """Claim and never let go, until killed."""
        while True:
            await claim_groups(self.plane, partition, groups_per_claim, owner=owner)
            await anyio.sleep(0.05)
