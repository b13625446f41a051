"""A Ray cluster that a run joins, and what it asks of it."""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from asyncrl.configs.sections.fields import Few, Seconds, Section, Text

ADDRESS = r"^(auto|[^\s/:]+:[0-9]{1,5}|\[[0-9a-fA-F:]+\]:[0-9]{1,5})$"
"""What names a cluster: `host:port`, or `auto`."""


def _address(value: Any) -> Any:
    if value is not None and not re.fullmatch(ADDRESS, str(value)):
        raise ValueError("it must be host:port, as `ray start --head` prints it, or auto")
    return value


class Cluster(Section):
    """Which Ray cluster a run works on (docs/clusters.md), and how its parts share devices."""

    address: Annotated[str | None, BeforeValidator(_address)]
    """Join the Ray cluster at this `host:port`, or the one that runs on this host (`auto`); null: the one that the
    variable `RAY_ADDRESS` names, else a cluster of the run's own, on this node's loopback."""
    environment: list[Text]
    """Names of variables whose values go to the processes on every node of a cluster that is joined."""
    exclude: list[Text]
    """Patterns, such as `data/*` or `*.bin`, of files of the working folder that stay here; all others go to every node
    of a cluster that is joined, but for hidden ones, `runs/`, virtual environments, and files of more than 16 MiB."""
    time_slicing: Literal["keep", "recompute"] | None
    """Ranks and generators have their devices in turns, on every runtime: while the ranks train, what the generators
    have is in the host's memory, and the other way round. `keep`: the key-value cache too; `recompute`: it is made anew
    after each step. null: both have their devices all the time (docs/generation.md)."""
    layout: Literal["any", "apart", "colocated"]
    """On a cluster that is joined, `apart`: no node has ranks and collectors; `colocated`: each collector is on a
    rank's node; `any`: each part is where there is room, on as few nodes as can be."""
    nodes: Few | None
    """Most nodes of a cluster that is joined on which the parts of the run may be; null: as many as it takes."""
    rank_gpus: Annotated[float, Field(ge=0, le=1)] | None
    """What each rank asks of a GPU on a cluster that is joined: 1 (it has one alone), a part, or 0. null: 1, or 0
    where `trainer.device` is cpu or no node has a GPU. CPUs it asks for `trainer.threads`."""
    collector_gpus: Annotated[float, Field(ge=0, le=1)] | None
    """The same for each collector, and for what evaluates; with `collector.device`. CPUs it asks for
    `collector.threads` and those of its workers."""
    worker_cpus: Annotated[float, Field(ge=0, le=1024)]
    """CPUs that a collector asks for each of its `collector.score_processes`."""
    max_collectors: Few | None
    """Collectors join while the run goes on, up to so many, where there is room for them, also on nodes that are added,
    and leave nodes that are drained. null: there are `collector.count`, from the beginning to the end."""
    place_timeout_s: Seconds
    """How long a run waits until a cluster that is joined has room for all its parts."""
