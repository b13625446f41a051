"""The asynchronous path of the seed documents, on real TransferQueue with a collector actor on Ray."""

from collections import Counter
from functools import partial
from typing import Any

import anyio
import pytest
import ray
from anyio.from_thread import BlockingPortal

from asyncrl.engine.data_plane.base import Consumption, Partition
from asyncrl.engine.data_plane.tq import TransferQueuePlane
from asyncrl.engine.events.ledger import Ledger
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.types import StepStarted
from asyncrl.engine.loop.front_end import FrontEnd, FrontEndSettings
from asyncrl.engine.loop.groups import Groups
from asyncrl.engine.loop.run_ahead import RunAhead
from asyncrl.engine.loop.settlement import Settlement, trained_fates
from asyncrl.engine.loop.versions import Versions
from asyncrl.engine.model.tokenizer import CharTokenizer
from asyncrl.engine.records import Grant, GroupMeta, Plan, Prompt
from asyncrl.engine.records.columns import COLUMNS, LOGPROBS, TOKENS
from asyncrl.engine.records.keys import sample_keys
from asyncrl.engine.records.message import PutNotice
from asyncrl.engine.testing.conformance.plane_actors import CollectorActor, PlaneActor
from asyncrl.engine.weights.base import Offer
from asyncrl.filters import build_chain
from asyncrl.filters.statistics import RunningStatistics
from asyncrl.trainers.fan_out import plan_batch

PARTITION = "seeds_flow"
SIZE = 4
STALE, FRESH = range(4), range(4, 8)
CURRENT = 4
# Prompt 2 is solved: all its samples have one reward.
REWARDS = [[0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0], [1.0] * SIZE, [0.25, 0.5, 0.0, 0.0]]


@pytest.mark.timeout(100)
def test_the_seeds_flow_generate_claim_filter_fan_out_and_clear(
    portal: BlockingPortal, ray_plane: TransferQueuePlane
) -> None:
    portal.call(_flow, ray_plane)


async def _flow(plane: TransferQueuePlane) -> None:
    await plane.register(Partition(PARTITION, SIZE, COLUMNS, ("trainer",)))
    ledger = Ledger()
    log = EventLog(clock=lambda: 0.0, wall=lambda: 0.0, folds=[ledger])
    groups = Groups(plane=plane, partition=PARTITION, consumer="trainer", log=log, run_ahead=RunAhead(8))
    collector, *ranks = [
        ray.remote(kind).options(num_cpus=0).remote() for kind in (CollectorActor, PlaneActor, PlaneActor)
    ]
    for actor in (collector, *ranks):
        await actor.connect.remote(deadline_s=30)
    running = await _collect(collector, groups)

    batch_keys, judged = await _claim_and_filter(plane, groups, log)
    fresh_and_mixed = {key for group in (4, 5, 7) for key in sample_keys(CURRENT, group, SIZE)}
    assert batch_keys == fresh_and_mixed

    plan = _fan_out(judged, batch_keys)
    log.append(StepStarted(step=CURRENT + 1, version=CURRENT, groups=[meta.group for meta in judged]))
    await _train(ranks, plan)

    await groups.settle([Settlement(meta, trained_fates(meta, range(SIZE), {})) for meta in judged])
    assert await plane.keys(PARTITION) == []
    assert await plane.consumption(PARTITION, "trainer") == Consumption(ready=0, claimed=0)
    totals = ledger.summary()
    assert totals["trained"] == 3 * SIZE
    assert totals["dropped"] == {"stale": 4 * SIZE, "zero_std": SIZE}
    await collector.call.remote("stop")
    await running
    for actor in (collector, *ranks):
        ray.kill(actor)


async def _collect(collector: Any, groups: Groups) -> Any:
    """Generate four groups under version 1 and four under the current one; return the collector's run."""
    await collector.collect.remote(PARTITION, REWARDS)
    running = collector.call.remote("run")
    for version, numbers in ((1, STALE), (CURRENT, FRESH)):
        await collector.call.remote("update_weights", version, Offer({}))
        grants = [Grant(n, Prompt(n % 4, f"{n % 4}>"), SIZE, 0) for n in numbers]
        for grant in grants:
            groups.dispatch(grant, "collector", served=version)
        await collector.call.remote("grant", grants)
        last = 0
        with anyio.fail_after(30):
            while any(groups.in_flight(grant.group) for grant in grants):
                for number, message in await collector.call.remote("events", last, 5.0):
                    last = number
                    if isinstance(message, PutNotice):
                        groups.arrive(message.group)
        assert set(groups.versions_buffered()[-len(numbers) :]) == {version}
    return running


async def _claim_and_filter(
    plane: TransferQueuePlane, groups: Groups, log: EventLog
) -> tuple[set[str], list[GroupMeta]]:
    versions = Versions(["collector"])
    versions.jump_to(CURRENT)
    settings = FrontEndSettings(
        owner="driver",
        groups_per_step=len(STALE) + len(FRESH),
        max_staleness=2,
        stale_mode="drop",
        gate_timeout_s=600.0,
        seed=0,
        poll_s=0.1,
        starve_timeout_s=20,
        lease_s=600,
    )
    front_end = FrontEnd(
        settings,
        plane=plane,
        groups=groups,
        chain=build_chain([{"name": "staleness"}, {"name": "zero_std"}], min_live=2),
        versions=versions,
        log=log,
        judged=RunningStatistics(),
        more_may_come=lambda: True,
    )
    batch = await front_end.next_batch()
    # The oldest first, then in order of dispatch.
    assert batch.judged == [*STALE, *FRESH]
    assert batch.drops == {"stale": 4, "zero_std": 1}
    await front_end.hand_off(batch)
    metas = [judgement.group for judgement in batch.kept]
    kept = {key for meta in metas for key in meta.keys}
    # The dropped keys are cleared by now; the kept ones, and no others, are there.
    assert set(await plane.keys(PARTITION)) == kept
    return kept, metas


def _fan_out(metas: list[GroupMeta], keys: set[str]) -> Plan:
    lengths = {
        key: meta.prompt_tokens + tokens
        for meta in metas
        for key, tokens in zip(meta.keys, meta.response_tokens, strict=True)
    }
    plan = plan_batch(lengths, ranks=2, budget_tokens=16)
    planned = Counter(key for rank in plan.ranks for micro in rank if not micro.filler for key in micro.keys)
    # Coverage by counter: a key twice, or one swapped for another, does not pass.
    assert planned == Counter(keys)
    assert len({len(rank) for rank in plan.ranks}) == 1
    return plan


async def _train(ranks: list[Any], plan: Plan) -> None:
    """Each rank reads its own rows, and they are the samples that their keys say."""
    tokenizer = CharTokenizer()

    async def read(rank: Any, keys: list[str]) -> None:
        values = await rank.call.remote("read", PARTITION, keys, COLUMNS)
        for key, tokens, logprobs in zip(keys, values[TOKENS], values[LOGPROBS], strict=True):
            group, index = int(key.split("_")[1][1:]), key.rpartition("_g")[2]
            response = [*tokenizer.encode(index), tokenizer.eos_id]
            assert tokens.tolist() == [*tokenizer.encode(f"{group % 4}>"), *response]
            assert logprobs.tolist() == [-1.0] * len(response)

    async with anyio.create_task_group() as tasks:
        for rank, micros in zip(ranks, plan.ranks, strict=True):
            keys = [key for micro in micros if not micro.filler for key in micro.keys]
            assert keys
            tasks.start_soon(partial(read, rank, keys))
