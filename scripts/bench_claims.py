#!/usr/bin/env python
"""Claims per second through TransferQueue: one JSON line.

Keeps `--live` groups in a partition, and claims and gives back, `--at-once` claimers at the same time, each one call
after the other. `claims_per_s` and `groups_per_s` count what was claimed over the seconds in which claims were under
way; `claim_ms_median` is what one claimer waits. A first claim is not counted. In one process by default, on Ray with
`--ray`.
"""

import argparse
import json
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import anyio

from asyncrl.engine.lifecycle.process_env import prepare


async def bench(
    *, live: int, groups_per_claim: int, claims: int, at_once: int, on_ray: bool
) -> dict[str, float | int | bool]:
    from asyncrl.engine.data_plane.base import Claim
    from asyncrl.engine.data_plane.shared_memory import shared_directory
    from asyncrl.engine.data_plane.tq import TransferQueuePlane
    from asyncrl.engine.testing.conformance.plane_contract import (
        claim_groups,
        contract_group,
        contract_partition,
        put_groups,
    )
    from asyncrl.engine.testing.conformance.queue_in_process import queue_in_process

    async with AsyncExitStack() as stack:
        memory = shared_directory("auto") or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if on_ray:
            from asyncrl.engine.lifecycle.ray_runtime import ray_cluster

            await stack.enter_async_context(ray_cluster())
            plane = await TransferQueuePlane.start(storage_units=2, deadline_s=60, start_s=120, shared_memory=memory)
        else:
            plane = queue_in_process(deadline_s=60, shared_memory=memory)
        stack.push_async_callback(plane.close)
        await plane.register(contract_partition("bench"))
        start = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for first in range(4):
                tasks.start_soon(put_groups, plane, "bench", [contract_group(n) for n in range(first, live, 4)])
        put_s = time.perf_counter() - start
        # The first claim takes note of all that was put; in a run every operation notes what came since the last.
        await plane.give_back((await claim_groups(plane, "bench", groups_per_claim)).lease)
        claimed = 0
        claim_s: list[float] = []
        rounds_s = 0.0
        for _ in range(claims // at_once):
            taken: list[Claim] = []

            async def one(taken: list[Claim] = taken) -> None:
                start = time.perf_counter()
                taken.append(await claim_groups(plane, "bench", groups_per_claim))
                claim_s.append(time.perf_counter() - start)

            start = time.perf_counter()
            async with anyio.create_task_group() as tasks:
                for _ in range(at_once):
                    tasks.start_soon(one)
            rounds_s += time.perf_counter() - start
            claimed += sum(len(claim.groups) for claim in taken)
            for claim in taken:
                await plane.give_back(claim.lease)
        return {
            "on_ray": on_ray,
            "live_groups": live,
            "groups_per_claim": groups_per_claim,
            "at_once": at_once,
            "claims_per_s": round(len(claim_s) / rounds_s, 1),
            "groups_per_s": round(claimed / rounds_s, 1),
            "claim_ms_median": round(1000 * sorted(claim_s)[len(claim_s) // 2], 3),
            "puts_per_s": round(live / put_s, 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--live", type=int, default=1000, help="groups in the partition")
    parser.add_argument("--groups-per-claim", type=int, default=16)
    parser.add_argument("--claims", type=int, default=400)
    parser.add_argument("--at-once", type=int, default=16, help="claimers at the same time; 1 is one after the other")
    parser.add_argument("--ray", action="store_true", help="TransferQueue in its own processes")
    options = parser.parse_args()
    prepare(threads=1)
    result = anyio.run(
        lambda: bench(
            live=options.live,
            groups_per_claim=options.groups_per_claim,
            claims=options.claims,
            at_once=options.at_once,
            on_ray=options.ray,
        )
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
