"""A program of the tests: TransferQueue on a cluster without a free CPU, until one of its processes is killed.

Prints one JSON object of what happened and how long it took.
"""

import json
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
    if victim == "controller":
        actor = ray.get_actor("TransferQueueController", namespace="transfer_queue")
    else:
        actor = ray.get_actor("TransferQueueStorageUnit#1", namespace="asyncrl")
    began = time.monotonic()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(_kill_soon, actor))
        seen["watch"] = await error_of(plane.watch())
    seen["watch_s"] = time.monotonic() - began
    began = time.monotonic()
    seen["after"] = await error_of(plane.keys("p"))
    await plane.close()
    seen["end_s"] = time.monotonic() - began
    return seen


async def _kill_soon(actor: Any) -> None:
    import ray

    await anyio.sleep(0.5)
    ray.kill(actor, no_restart=True)


if __name__ == "__main__":
    prepare(threads=1)
    import ray

    ray.init(address="local", num_cpus=0, namespace="asyncrl", include_dashboard=False, _node_ip_address="127.0.0.1")
    sys.stdout.write(json.dumps(anyio.run(main, sys.argv[1])) + "\n")
    ray.shutdown()
