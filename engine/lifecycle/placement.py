"""Which node of a cluster each part of a run goes to: pure arithmetic on what the parts ask for and the nodes have."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

from asyncrl.configs import RunConfig
from asyncrl.engine.deployment import EVALUATOR
from asyncrl.engine.errors import ConfigError

Layout = Literal["any", "apart", "colocated"]

_ROUNDING = 1e-6


class DoesNotFit(ConfigError):
    """The nodes have no room for a part; the message names it, what it asks for, and what each node has."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a cluster: its resources in all, and those that nobody has asked for, such as `CPU` and `GPU`."""

    id: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    is_driver: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """What a part (`rank0`, `collector0`, `evaluator`) asks of its node."""

    part: str
    cpus: float
    gpus: float = 0.0

    @property
    def is_rank(self) -> bool:
        return self.part.startswith("rank")

    @property
    def bundle(self) -> dict[str, float]:
        """What it asks for by Ray's names, without zeros."""
        return {name: amount for name, amount in (("CPU", self.cpus), ("GPU", self.gpus)) if amount}

    def __str__(self) -> str:
        return f"{self.part} ({self.cpus:g} CPUs{f', {self.gpus:g} GPUs' if self.gpus else ''})"


def requests_of(config: RunConfig, nodes: Sequence[Node]) -> list[Request]:
    """Return what the parts of a run ask for: ranks first, then collectors, then what evaluates."""
    cluster, collector, trainer = config.cluster, config.collector, config.trainer
    any_gpu = any(node.total.get("GPU", 0) for node in nodes)
    rank_gpus = _gpus(cluster.rank_gpus, trainer.device, any_gpu=any_gpu)
    collector_gpus = _gpus(cluster.collector_gpus, collector.device, any_gpu=any_gpu)
    cpus = collector.threads + cluster.worker_cpus * collector.score_processes
    ranks = [Request(f"rank{i}", trainer.threads, rank_gpus) for i in range(trainer.ranks)]
    collectors = [Request(f"collector{i}", cpus, collector_gpus) for i in range(collector.count)]
    evaluators = [Request(EVALUATOR, cpus, collector_gpus)] if config.evaluation.every is not None else []
    return [*ranks, *collectors, *evaluators]


def _gpus(asked: float | None, device: str, *, any_gpu: bool) -> float:
    if asked is not None:
        return asked
    return 1.0 if device == "cuda" or (device == "auto" and any_gpu) else 0.0


def assign(
    requests: Sequence[Request], nodes: Sequence[Node], *, layout: Layout, most_nodes: int | None = None
) -> dict[str, Node]:
    """Return the node of each part, on as few nodes as first-fit decreasing finds; DoesNotFit without room.

    Example: two nodes with 2 GPUs each, two ranks and two collectors with a GPU each. `any` and `apart` give ranks the
    first node and collectors the second; `colocated` gives each node a rank and a collector.
    """
    ordered = sorted(nodes, key=lambda node: (-node.free.get("GPU", 0), -node.free.get("CPU", 0), not node.is_driver))
    for number in count(1):
        try:
            return _assign_to(requests, ordered[:number], layout)
        except DoesNotFit:
            if number >= min(len(ordered), most_nodes or len(ordered)):
                raise
    raise AssertionError


def _assign_to(requests: Sequence[Request], nodes: Sequence[Node], layout: Layout) -> dict[str, Node]:
    ranks = [request for request in requests if request.is_rank]
    others = [request for request in requests if not request.is_rank]
    if layout == "colocated":
        shared = [[rank, *others[i :: len(ranks)]] for i, rank in enumerate(ranks)]
        return _fit(shared, nodes, "with `cluster.layout` colocated")
    if layout == "any":
        return _fit([[request] for request in requests], nodes, "")
    # The fewest nodes that take the ranks; the others are for collectors.
    for number in range(1, len(nodes)):
        try:
            with_ranks = _fit([[rank] for rank in ranks], nodes[:number], "")
        except DoesNotFit:
            continue
        return with_ranks | _fit([[other] for other in others], nodes[number:], "beside the nodes of ranks")
    raise DoesNotFit(_says(ranks[0], nodes, "with `cluster.layout` apart, which takes two nodes or more"))


def _fit(units: Iterable[Sequence[Request]], nodes: Sequence[Node], how: str) -> dict[str, Node]:
    """Place units, each whole on one node, the largest first."""
    left = {node.id: dict(node.free) for node in nodes}
    placed: dict[str, Node] = {}
    for unit in sorted(units, key=_size, reverse=True):
        for node in nodes:
            if all(left[node.id].get(name, 0) + _ROUNDING >= amount for name, amount in _sum(unit).items()):
                for name, amount in _sum(unit).items():
                    left[node.id][name] -= amount
                placed |= {request.part: node for request in unit}
                break
        else:
            had = [Node(node.id, node.address, node.total, left[node.id]) for node in nodes]
            raise DoesNotFit(_says(unit[0], had, how, [str(request) for request in unit[1:]]))
    return placed


def _size(unit: Sequence[Request]) -> tuple[float, bool, float]:
    """Order units; of those with as many GPUs, ranks go first: they talk to each other most."""
    asked = _sum(unit)
    return asked.get("GPU", 0), unit[0].is_rank, asked.get("CPU", 0)


def _sum(unit: Sequence[Request]) -> dict[str, float]:
    asked: dict[str, float] = {}
    for request in unit:
        for name, amount in request.bundle.items():
            asked[name] = asked.get(name, 0) + amount
    return asked


def _says(request: Request, nodes: Sequence[Node], how: str, together: Sequence[str] = ()) -> str:
    what = " and ".join([str(request), *together])
    rooms = "; ".join(
        f"{node.address} has {_room(node, 'CPU')} CPUs and {_room(node, 'GPU')} GPUs left" for node in nodes
    )
    return (
        f"there is no room for {what}{' ' if how else ''}{how}: {rooms or 'there are no nodes'}. Lower trainer.ranks, "
        "collector.count, the threads and GPUs of parts, or cluster.worker_cpus; or raise cluster.nodes"
    )


def _room(node: Node, name: str) -> str:
    return f"{node.free.get(name, 0):g} of {node.total.get(name, 0):g}"
