"""The interface between collector and generator."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from asyncrl.collectors.outcome import Outcome
from asyncrl.engine.records import Prompt
from asyncrl.engine.weights.base import State

if TYPE_CHECKING:
    from asyncrl.collectors.engines.base import Cache
    from asyncrl.collectors.engines.expert_record import Experts


def _nothing(decoding: bool) -> None:
    pass


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A request for one completion per seed, for one prompt.

    `surplus` of the seeds are to spare: the first `size` completions to end are the answer, and the others are aborted.
    A generator that decodes its samples together, and cannot abort one, does without the last `surplus` seeds.
    The generator calls `turn(True)` when the request begins to decode, and `turn(False)` when it has to wait
    again: two waits, with a limit each. `batch` numbers the groups that were granted together, `peers` of them.
    `prompt` is the record that an environment is given.
    """

    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    turn: Callable[[bool], None] = _nothing
    batch: int = 0
    peers: int = 1
    surplus: int = 0
    prompt: Prompt | None = None

    @property
    def size(self) -> int:
        """How many completions are asked for."""
        return len(self.seeds) - self.surplus


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion. `logprobs` are those of the distribution that was sampled, one per token.

    `spans` tile the tokens: (version, first, end). `finished` is False when a limit cut it. `generated` has the places
    [first, end) of tokens that were sampled, if others stand between them, whose log-probability is given as 0.
    `outcome` is that of an environment; None: it is to be scored. `prompt_ids` is what it was asked with, if an agent
    wrote that in place of the group's prompt; those of a group are the same. `experts` has a row for each token of
    prompt and response, where the engine records what its routers chose.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[tuple[int, int, int], ...]
    finished: bool
    generated: tuple[tuple[int, int], ...] | None = None
    outcome: Outcome | None = None
    prompt_ids: tuple[int, ...] | None = None
    experts: "Experts | None" = field(default=None, compare=False)

    @property
    def sampled_ids(self) -> tuple[int, ...]:
        """The tokens that were sampled, joined."""
        if self.generated is None:
            return self.token_ids
        return tuple(token for first, end in self.generated for token in self.token_ids[first:end])

    @property
    def fault(self) -> str | None:
        """Return why it cannot be trained on: a token without a log-probability, or one that is not finite."""
        if len(self.logprobs) != len(self.token_ids):
            return f"{len(self.token_ids)} tokens and {len(self.logprobs)} log-probabilities"
        odd = next((at for at, value in enumerate(self.logprobs) if not _finite(value)), None)
        return None if odd is None else f"the log-probability of token {odd} is {self.logprobs[odd]}"


def _finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except TypeError:  # None, from an engine that gave no log-probability for this token.
        return False


class Generator(Protocol):
    """Asynchronous generation; cancelling a `generate` frees its place."""

    async def run(self) -> None:
        """Serve requests until cancelled; raises what generation raised."""

    async def generate(self, request: GroupRequest) -> Sequence[Completion]:
        """Return `request.size` completions, in the order of their seeds."""

    async def update_weights(self, version: int, state: State) -> Any:
        """Swap all weights; return once the new ones are in force, with what it took where the generator knows."""

    async def sleep(self, cache: "Cache") -> None:
        """Return once nothing is generated, and the device's memory is free; see `SleepingEngine`."""

    async def wake(self) -> None:
        """Return once the device is in use again; what was begun goes on."""

    async def stats(self) -> dict[str, Any]:
        """Return the version in force, and what it knows of the figures of `EngineStats`, by their names."""
