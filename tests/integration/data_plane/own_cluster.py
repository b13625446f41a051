"""A program of the tests: TransferQueue on a cluster without a free CPU, until one of its processes is killed, or
suspended; and again on the next cluster.

Prints one JSON object of what happened and how long it took.
"""

import json
import os
import signal
import sys
import time
from functools import partial
from typing import Any

import anyio

from asyncrl.engine.lifecycle.process_env import prepare


async def main(victim: str) -> dict[str, Any]:
    import ray

    from asyncrl.engine.data_plane.tq import TransferQueuePlane
    from asyncrl.engine.errors import AsyncRLError
    from asyncrl.engine.testing.conformance.plane_contract import (
        claim_groups,
        contract_group,
        contract_partition,
        put_groups,
        rows_of,
    )

    async def error_of(call: Any) -> str:
        try:
            await call
        except AsyncRLError as error:
            return type(error).__name__
        return "none"

    seen: dict[str, Any] = {}
    start = partial(TransferQueuePlane.start, storage_units=2, deadline_s=5)
    seen["attach_without_owner"] = await error_of(TransferQueuePlane.attach(deadline_s=5, start_s=20))
    plane = await start(start_s=60)
    seen["second_start"] = await error_of(start(start_s=20))
    await plane.register(contract_partition("p"))
    await put_groups(plane, "p", [contract_group(0)])
    seen["claimed"] = rows_of(await claim_groups(plane, "p"))
    name = {"controller": "TransferQueueController", "storage unit": "TransferQueueStorageUnit#1"}[victim]
    actor = ray.get_actor(name, namespace="asyncrl")
    began = time.monotonic()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_break_soon, actor, victim)
        seen["watch"] = await error_of(plane.watch())
    seen["watch_s"] = time.monotonic() - began
    began = time.monotonic()
    seen["after"] = await error_of(plane.keys("p"))
    await plane.close()
    seen["end_s"] = time.monotonic() - began
    return seen


async def _break_soon(actor: Any, victim: str) -> None:
    import ray

    await anyio.sleep(0.5)
    if victim == "controller":
        ray.kill(actor, no_restart=True)
    else:
        os.kill(await actor.__ray_call__.remote(lambda _: os.getpid()), signal.SIGSTOP)


async def again() -> dict[str, Any]:
    from asyncrl.engine.data_plane.tq import TransferQueuePlane

    began = time.monotonic()
    plane = await TransferQueuePlane.start(storage_units=1, deadline_s=5, start_s=60)
    await plane.close()
    return {"again_s": time.monotonic() - began}


def on_cluster(call: Any) -> dict[str, Any]:
    import ray

    ray.init(address="local", num_cpus=0, namespace="asyncrl", include_dashboard=False, _node_ip_address="127.0.0.1")
    found: dict[str, Any] = anyio.run(call)
    ray.shutdown()
    return found


if __name__ == "__main__":
    prepare(threads=1)
    seen = on_cluster(partial(main, sys.argv[1])) | on_cluster(again)
    sys.stdout.write(json.dumps(seen) + "\n")
