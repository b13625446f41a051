"""What the HTTP engine asks of a kind of server."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec

from asyncrl.collectors.engines.answer import Answer
from asyncrl.collectors.engines.base import Finish, Request, Spans
from asyncrl.collectors.engines.http.client import Client
from asyncrl.collectors.engines.in_flight import Pressure

PRESSURE_TIMEOUT_S = 2.0
"""What a server says of its cache is of no use later; whether it lives is for probes to tell."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Tokens of a response as they come; the last reply says how it ended, and the versions of all tokens of it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish | None = None
    spans: Spans = ()


TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class Span(msgspec.Struct, frozen=True):
    """Tokens from `start` to before `end` of an answer, and the label of the weights that made them."""

    version: int | str
    start: Count
    end: Count


def spans_of(told: Sequence[Span]) -> Spans:
    """Return versions as numbers; ValueError for a label that is not one."""
    return tuple((int(span.version), span.start, span.end) for span in told if span.end > span.start)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a run needs of a server: entries of its model's configuration, positions, and a file that it must see."""

    shape: Mapping[str, Any]
    max_length: int
    file: Path


class Server(Protocol):
    """One replica. All but `generate` may be called twice for once. ServerDown, or Refused, if it fails.

    While it is held, no forward pass runs, and what is asked waits.
    """

    def generate(self, name: str, request: Request, answer: Answer, salt: str) -> AsyncGenerator[Reply, None]:
        """Yield replies; what is cached of the prompt is found by requests of the same salt alone."""

    async def abort(self, name: str) -> None: ...

    async def fault(self, wanted: Wanted) -> str:
        """Return why a run could not use this server, and what to do, as far as it tells; empty if it could."""

    async def probe(self, timeout_s: float) -> None:
        """Return if the server is healthy."""

    async def pressure(self) -> Pressure | None:
        """Return how full it is, its preemptions counted from the first call on; None if it does not tell."""

    async def version(self) -> int | None:
        """Return the version with which it stamps tokens; None if it has no number yet."""

    async def hold(self, *, empty_cache: bool) -> None:
        """Stop between two tokens; with `empty_cache`, what is in flight goes on behind a cache made anew."""

    async def go_on(self) -> None: ...

    async def load(self, file: Path | None) -> None:
        """Load the weights of a file, None for those of the checkpoint; held meanwhile."""

    async def differences(self, file: Path | None) -> list[str]:
        """Return which of the server's weights are not those of the file."""

    async def label(self, version: int) -> None:
        """Stamp the tokens to come with a version."""

    async def close(self) -> None: ...


MakeServer = Callable[[Client, Path], Server]
"""(client, checkpoint folder) → a server's routes."""


def finish_of(word: str) -> Finish:
    """Return what a server's word for the end of a response means."""
    known: dict[str, Finish] = {"stop": "stop", "length": "length", "abort": "abort"}
    return known.get(word, "error")


def differing_shape(found: Mapping[str, Any], wanted: Wanted) -> str:
    """Return in which entry a server's model is another than the run's; empty if it is in none that both have.

    Example: "hidden_size is 64 there, and 128 in model.path".
    """
    differ = (name for name, value in wanted.shape.items() if name in found and found[name] != value)
    return next((f"{name} is {found[name]} there, and {wanted.shape[name]} in model.path" for name in differ), "")
