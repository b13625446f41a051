"""A program of the tests: prints what is on the Ray cluster at an address."""

import json
import sys

import ray


def there() -> dict[str, list[str]]:
    """Return living nodes, living actors by job, and placement groups."""
    from ray._private.state import actors
    from ray.util import placement_group_table

    living = [actor for actor in actors().values() if actor["State"] != "DEAD"]
    groups = [group for group in placement_group_table().values() if group["state"] != "REMOVED"]
    return {
        "nodes": sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]),
        "actors": sorted(f"{actor['JobID']}/{actor['Name'] or actor['ActorClassName']}" for actor in living),
        "placement_groups": sorted(group["name"] for group in groups),
    }


if __name__ == "__main__":
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
    sys.stdout.write(json.dumps(there()) + "\n")
