"""What a collector asks of an engine: tokens with their log-probabilities and the version of the weights behind each.

Invariants, held by one contract suite for every engine: a stream ends with exactly one `Result`, also after an abort
or an error; its tokens are those that `done` had and those of the chunks before it; its spans tile them; no token is
made from half-written weights; an update that fails leaves the old version serving.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from asyncrl.collectors.engines.expert_record import Experts

Finish = Literal["stop", "length", "abort", "error"]
InFlight = Literal["keep", "drain", "abort"]
Cache = Literal["keep", "recompute"]
Spans = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn, and what ends a response.

    `top_k` 0, `top_p` 1 and `min_p` 0 leave the distribution as it is; temperature 0 takes the likeliest token. The
    token that completes a stop string, or is one of `stop_ids`, is the response's last.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One response to one prompt. Requests of the same `group` share their prompt's key-value cache.

    `done` is what an aborted response had already: generation goes on behind it, its tokens count towards
    `max_new_tokens`, and the result holds them with their own log-probabilities and spans; no chunk does. With
    `stream` False nothing comes before the result, which spares a wake-up every few tokens.
    """

    id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    group: str = ""
    done: "Result | None" = None
    stream: bool = True


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of a response: one log-probability per token, of the distribution that was sampled.

    Their versions come with the result: some engines tell them only there.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """A whole response. `spans` tile its tokens as (version, first, end); `error` says what went wrong, or is empty.

    A request that cannot be served (no prompt, more tokens than the engine has positions) ends as `error`; so does
    one whose forward pass failed, with the tokens that it had. `experts` are those chosen for the tokens of prompt and
    response, of an engine that records them.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: Spans
    finish: Finish
    error: str = ""
    experts: "Experts | None" = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Update:
    """What an update took: `stage_s` beside generation, `pause_s` without a token made, and the bytes staged."""

    stage_s: float
    pause_s: float
    staged_bytes: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts of requests; `cache_used` is a share of the cache's memory; tokens and seconds are totals since start."""

    running: int
    waiting: int
    cache_used: float
    tokens: int
    busy_s: float
    paused_s: float
    version: int


class Engine(Protocol):
    """An inference engine in this process, in another one, or behind HTTP."""

    async def run(self) -> None:
        """Serve until cancelled; raises once the engine can serve no more. Requests in flight then end."""

    def generate(self, request: Request) -> AsyncGenerator[Chunk | Result, None]:
        """Yield chunks as they are made, then one result. Closing the iterator early aborts the request."""

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """End requests, all by default, each with the partial result `abort`, also while paused.

        Unknown ids are passed over.
        """

    async def pause(self, in_flight: InFlight = "keep") -> None:
        """Return once no forward pass runs; requests made meanwhile wait, and none fails.

        `keep` holds those in flight where they are, `drain` lets those that have begun end first, and `abort` ends
        all that were made before. A second pause, in the same way or in another, does what it says too.
        """

    async def resume(self) -> None:
        """Go on with what was kept and what has come since; nothing if the engine is not paused."""

    async def update_weights(self, version: int, state: Mapping[str, Any], cache: Cache = "keep") -> Update:
        """Stage all weights, then swap them between two tokens; what comes after it returns is of `version`.

        `state` holds Hugging Face names; of weights that are tied, one name is enough. With `recompute` what is in
        flight continues on a cache made anew. It needs no pause, and leaves a paused engine paused. VersionError,
        and the old weights serve on, if a name or a shape differs, if `version` is older than the one that serves,
        or if another update is under way.
        """

    async def reset_cache(self) -> None:
        """Forget what was cached of prompts; what is in flight continues on a cache made anew."""

    async def stats(self) -> EngineStats:
        """Return what the engine does now."""

    async def close(self) -> None:
        """Free what the engine holds; requests in flight end as aborted."""


class SleepingEngine(Engine, Protocol):
    """An engine that can leave its device to others for a while."""

    async def sleep(self, cache: Cache = "keep") -> None:
        """Stop between two tokens as a pause does that keeps, and return once weights and cache are off the device.

        They go to the host's memory; with `recompute` the cache does not, and is made anew afterwards. What is in
        flight keeps its tokens and their spans. A batch that is to be exact ends first. Updates are taken in sleep
        too. A second call changes nothing. GenerationError if the engine runs no longer.
        """

    async def wake(self) -> None:
        """Return once weights and cache are on the device again; a paused engine stays paused."""


class GroupEngine(SleepingEngine, Protocol):
    """An engine in this process, which takes groups without a task per response and repeats batches to the bit."""

    async def generate_group(self, requests: Sequence[Request], begun: Callable[[], None]) -> list[Result]:
        """Return results in the order of `requests`; `begun` is called whenever one of them begins to decode."""

    async def generate_batch(self, requests: Sequence[Request]) -> list[Result]:
        """Decode `requests` together, apart from all others, and under one version; return results in their order.

        Equal requests under equal weights give equal bits, whatever else the engine was asked meanwhile. An update
        waits for the batch's end.
        """
