"""What the controller drives, on any runtime: handles on actors, and prompts."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from asyncrl.collectors.engines.base import Cache
from asyncrl.engine.aio.outbox import Numbered
from asyncrl.engine.data_plane.base import DataPlane
from asyncrl.engine.model.folder import Note
from asyncrl.engine.records import Grant, Prompt, PromptStream
from asyncrl.engine.records.work import ForwardWork, RankResult, TrainWork
from asyncrl.engine.weights.base import Offer, Sent, WeightTransport
from asyncrl.trainers.fan_out import Cost

PARTITION = "train"
CONSUMER = "trainer"
EVALUATION = "eval"
EVALUATOR = "evaluator"


class Actor(Protocol):
    """Anything that answers the long poll."""

    @property
    def name(self) -> str: ...

    async def events(self, after_seq: int, wait_s: float) -> list[Numbered]: ...


class CollectorHandle(Actor, Protocol):
    async def run(self) -> None: ...

    async def stop(self) -> None: ...

    async def grant(self, grants: Sequence[Grant]) -> None: ...

    async def cancel(self, groups: Sequence[int]) -> None: ...

    async def update_weights(self, version: int, offer: Offer) -> Any: ...

    async def sleep(self, cache: Cache) -> None: ...

    async def wake(self) -> None: ...


class WeightSource(Protocol):
    """Whose weights are published."""

    async def offer(self, sent: Sent, receivers: Sequence[str], *, again: bool = False) -> Offer: ...

    async def serve(self, offer: Offer) -> None: ...


class RankHandle(Actor, WeightSource, Protocol):
    async def train(self, work: TrainWork) -> RankResult: ...

    async def logprobs(self, work: ForwardWork) -> dict[str, tuple[float, float]]: ...

    async def warm_up(
        self, examples: Sequence[tuple[list[int], int]], *, steps: int, batch: int, learning_rate: float
    ) -> float: ...

    async def weights(self) -> Sent: ...

    async def digest(self) -> Mapping[str, int]: ...

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


class ModelHolder(Protocol):
    """The rank that saves what is learned: `hold_weights`, then `save_held` beside the next steps."""

    async def hold_weights(self) -> int: ...

    async def save_held(self, folders: Sequence[str], note: Note) -> None: ...


class StateHolder(Protocol):
    """A rank whose state a checkpoint holds: `hold_state`, then `save_state` beside the next steps.

    `load_state` comes before the first step; the folder may be of another number of ranks.
    """

    async def hold_state(self) -> int: ...

    async def save_state(self, folder: str) -> None: ...

    async def load_state(self, folder: str) -> None: ...


class CopySource(Protocol):
    """The rank whose weights an evaluation is of."""

    async def copy_weights(self, transport: WeightTransport) -> Sent: ...


class Restarter(Protocol):
    """Starts another process in the place of a collector that died, or of the one that evaluates."""

    async def restart(self, name: str) -> CollectorHandle:
        """Kill what is left of the old process, and return the new one, attached to the data plane.

        It serves no version yet. ActorDied or Overdue if it does not come up.
        """

    def kill(self, name: str) -> None:
        """Kill what is left of an actor, so that calls to one that hangs end now; also that of a rank."""


class Roster(Protocol):
    """Where collectors can be on a cluster whose nodes come and go."""

    async def look(self) -> Mapping[str, float]:
        """Look at the nodes: return the collectors whose node is drained, each with the seconds that it has left."""

    async def recruit(self) -> CollectorHandle | None:
        """Start one more collector, attached to the data plane, under a name of its own; None without room for it.

        It serves no version yet. ActorDied or Overdue if it does not come up; then nothing of it stays.
        """

    def has_lost(self, name: str) -> bool:
        """Return whether the node of a collector is gone, so that none can come in its place."""

    async def dismiss(self, name: str) -> None:
        """End what is left of a collector, and give back its place; idempotent."""


@dataclass(frozen=True, slots=True)
class EvaluationPart:
    """What evaluates: a collector of its own, whose weights come from `source` by `transport`, and its prompts."""

    collector: CollectorHandle
    source: CopySource
    transport: WeightTransport
    prompts: Sequence[Prompt]


@dataclass(frozen=True, slots=True)
class Deployment:
    """A started run: data plane, collectors, ranks, and what to generate from.

    `prompts` are one epoch's, or a stream of their own order; `examples` are (ids, prompt tokens) for the supervised
    warm-up. The plan is balanced by `cost`, the FLOPs of samples of so many tokens; without it, by tokens. `owner`
    names this driver's claims; two drivers on one data plane need two names. `record` is given the number and the keys
    of each step before it is trained. Without `states` no checkpoint is made; without `restarter` no actor is replaced.
    Without `roster` no collector joins or leaves. `rank_nodes` are the addresses of the ranks' nodes, if the run is on
    several. Each of the `ranks` has a replica of the model, which several processes may hold together: `processes` then
    are all of them, and empty if every rank is one.
    """

    plane: DataPlane
    collectors: Sequence[CollectorHandle]
    ranks: Sequence[RankHandle]
    prompts: Sequence[Prompt] | PromptStream
    examples: Sequence[tuple[list[int], int]]
    cost: Cost | None = None
    owner: str = "driver"
    record: Callable[[int, Sequence[str]], Awaitable[None]] | None = None
    holder: ModelHolder | None = None
    states: Sequence[StateHolder] = ()
    evaluation: EvaluationPart | None = None
    restarter: Restarter | None = None
    rank_nodes: Sequence[str] = ()
    roster: Roster | None = None
    processes: Sequence[Actor] = ()

    @property
    def rank_actors(self) -> Sequence[Actor]:
        """Everybody who trains, to listen to."""
        return self.processes or self.ranks
