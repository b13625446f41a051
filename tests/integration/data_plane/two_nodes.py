"""A program of the tests: TransferQueue on a Ray cluster of two nodes. Prints the node of each storage unit as JSON."""

import json
import sys

import anyio

from asyncrl.engine.lifecycle.process_env import prepare


async def main(units: int) -> dict[str, str]:
    from ray._private.state import actors

    from asyncrl.engine.data_plane.tq import TransferQueuePlane
    from asyncrl.engine.testing.conformance.plane_contract import (
        claim_groups,
        contract_group,
        contract_partition,
        put_groups,
    )

    plane = await TransferQueuePlane.start(storage_units=units, deadline_s=20, start_s=60)
    await plane.register(contract_partition("p"))
    await put_groups(plane, "p", [contract_group(n) for n in range(units)])
    for group in (await claim_groups(plane, "p")).groups:
        # Rows go round the units: each of them is reached.
        await plane.read("p", group.keys, ("tokens",))
    found = {actor["Name"]: actor["Address"]["NodeID"] for actor in actors().values()}
    await plane.close()
    return {name: node for name, node in found.items() if name.startswith("TransferQueueStorageUnit")}


if __name__ == "__main__":
    prepare(threads=1)
    import ray
    from ray.cluster_utils import Cluster

    here = {"num_cpus": 1, "node_ip_address": "127.0.0.1"}
    cluster = Cluster(initialize_head=True, head_node_args={**here, "include_dashboard": False})
    cluster.add_node(**here)
    ray.init(address=cluster.address, namespace="asyncrl", log_to_driver=False, _node_ip_address="127.0.0.1")
    try:
        sys.stdout.write(json.dumps(anyio.run(main, int(sys.argv[1]))) + "\n")
    finally:
        ray.shutdown()
        cluster.shutdown()
