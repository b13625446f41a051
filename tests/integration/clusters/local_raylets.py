"""A program of the tests: a Ray cluster of raylets on this host, which others use as well.

Prints its address, and for each line read what is there: after it has done what a line says, `add CPUS` (a node) or
`drain SECONDS` (the last one).
"""

import json
import subprocess
import sys
from pathlib import Path

from asyncrl.engine.lifecycle.process_env import prepare

BYSTANDER = "TransferQueueController"
"""What somebody else's TransferQueue on the cluster is called, and where it is."""
ELSEWHERE = "transfer_queue"


class Bystander:
    """Somebody else's actor, which a run must neither take for its own nor end."""


def there() -> dict[str, list[str]]:
    """Return the living actors, by job, and the placement groups on the cluster."""
    from ray._private.state import actors
    from ray.util import placement_group_table

    living = [actor for actor in actors().values() if actor["State"] != "DEAD"]
    groups = [group for group in placement_group_table().values() if group["state"] != "REMOVED"]
    return {
        "actors": sorted(f"{actor['JobID']}/{actor['Name'] or actor['ActorClassName']}" for actor in living),
        "placement_groups": sorted(group["name"] for group in groups),
    }


def drain(address: str, node: str, seconds: str) -> None:
    """Do as an operator does."""
    reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "test"]
    command = [
        str(Path(sys.executable).with_name("ray")),
        "drain-node",
        "--address",
        address,
        "--node-id",
        node,
        *reason,
    ]
    subprocess.run(
        [*command, "--deadline-remaining-seconds", seconds], check=True, stdout=subprocess.DEVNULL, timeout=60
    )


if __name__ == "__main__":
    prepare(threads=1)
    import ray
    from ray.cluster_utils import Cluster

    cpus = [int(word) for word in sys.argv[1:]]
    here = {"node_ip_address": "127.0.0.1"}
    cluster = Cluster(initialize_head=True, head_node_args={**here, "num_cpus": cpus[0], "include_dashboard": False})
    added = [cluster.add_node(**here, num_cpus=count) for count in cpus[1:]]
    ray.init(address=cluster.address, namespace="others", log_to_driver=False, _node_ip_address="127.0.0.1")
    bystander = ray.remote(Bystander).options(name=BYSTANDER, namespace=ELSEWHERE, num_cpus=0).remote()
    sys.stdout.write(json.dumps({"address": cluster.address}) + "\n")
    sys.stdout.flush()
    try:
        for line in sys.stdin:
            match line.split():
                case ["add", count]:
                    added.append(cluster.add_node(**here, num_cpus=int(count)))
                case ["drain", seconds]:
                    drain(cluster.address, added[-1].node_id, seconds)
            sys.stdout.write(json.dumps(there()) + "\n")
            sys.stdout.flush()
    finally:
        ray.shutdown()
        cluster.shutdown()
