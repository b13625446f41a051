"""What the controller drives, on any runtime: handles on actors, and prompts."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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
    of each step before it is trained. Without `states` no checkpoint is made.
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
