#!/usr/bin/env python
"""Claims a second through TransferQueue: one JSON line.

Keeps `--live` groups in a partition, and claims and gives back. `groups_per_s` counts claimed
groups over the seconds that claims took. In one process by default, on Ray with `--ray`.
"""

import argparse
import json
import time
from contextlib import AsyncExitStack

import anyio

from asyncrl.engine.lifecycle.process_env import prepare


async def bench(*, live: int, groups_per_claim: int, claims: int, on_ray: bool) -> dict[str, float | int | bool]:
    from asyncrl.engine.data_plane.tq import TransferQueuePlane
    from asyncrl.engine.testing.conformance.plane_contract import (
        claim_groups,
        contract_group,
        contract_partition,
        put_groups,
    )
    from asyncrl.engine.testing.conformance.queue_in_process import queue_in_process

    async with AsyncExitStack() as stack:
        if on_ray:
            from asyncrl.engine.lifecycle.ray_runtime import ray_cluster

            await stack.enter_async_context(ray_cluster())
            plane = await TransferQueuePlane.start(storage_units=2, deadline_s=60, start_s=120)
        else:
            plane = queue_in_process(deadline_s=60)
        stack.push_async_callback(plane.close)
        await plane.register(contract_partition("bench"))
        start = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for first in range(4):
                tasks.start_soon(put_groups, plane, "bench", [contract_group(n) for n in range(first, live, 4)])
        put_s = time.perf_counter() - start
        claimed, claim_s = 0, []
        for _ in range(claims):
            start = time.perf_counter()
            claim = await claim_groups(plane, "bench", groups_per_claim)
            claim_s.append(time.perf_counter() - start)
            claimed += len(claim.groups)
            await plane.give_back(claim.lease)
        return {
            "on_ray": on_ray,
            "live_groups": live,
            "groups_per_claim": groups_per_claim,
            "groups_per_s": round(claimed / sum(claim_s), 1),
            "claim_ms_median": round(1000 * sorted(claim_s)[len(claim_s) // 2], 3),
            "puts_per_s": round(live / put_s, 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--live", type=int, default=1000, help="groups in the partition")
    parser.add_argument("--groups-per-claim", type=int, default=16)
    parser.add_argument("--claims", type=int, default=200)
    parser.add_argument("--ray", action="store_true", help="TransferQueue in its own processes")
    options = parser.parse_args()
    prepare(threads=1)
    result = anyio.run(
        lambda: bench(
            live=options.live,
            groups_per_claim=options.groups_per_claim,
            claims=options.claims,
            on_ray=options.ray,
        )
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
