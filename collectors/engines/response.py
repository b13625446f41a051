"""A request in an engine, and what has been made of it so far.

Invariants: spans tile the tokens; each token has one log-probability; it ends once, and whoever reads it gets every
token made before that, and then one result.
"""

from collections.abc import AsyncGenerator, Callable, Sequence

import anyio

from asyncrl.collectors.engines.base import Chunk, Finish, Request, Result, Sampling, Spans
from asyncrl.collectors.engines.expert_record import Experts, joined, with_missing

Span = tuple[int, int, int]


def _nothing() -> None:
    pass


class Response:
    """Begins with what `request.done` has. `begun` is called when it gets a slot."""

    def __init__(self, request: Request, begun: Callable[[], None] = _nothing) -> None:
        done = request.done
        self.begun = begun
        self.request = request
        self.slot = -1
        self.filled_in = -1
        """In which cache its prompt was filled: they are numbered, as weights and resets make the old ones unfit."""
        self.under_way = 0
        """How many steps it has in bursts that have begun and were not taken."""
        self._tokens = list(done.token_ids) if done else []
        self._logprobs = list(done.logprobs) if done else []
        self._spans = list(done.spans) if done else []
        self._sent = len(self._tokens)
        self._experts = done.experts if done else None
        self._result: Result | None = None
        self._changed = anyio.Event()

    @property
    def sampling(self) -> Sampling:
        return self.request.sampling

    @property
    def made(self) -> int:
        return len(self._tokens)

    @property
    def sequence(self) -> list[int]:
        """The prompt's tokens and its own."""
        return [*self.request.prompt_ids, *self._tokens]

    @property
    def last_token(self) -> int:
        return self._tokens[-1] if self._tokens else self.request.prompt_ids[-1]

    @property
    def position(self) -> int:
        """The position of its last token, of the prompt if it has none."""
        return len(self.request.prompt_ids) + len(self._tokens) - 1

    @property
    def ended(self) -> bool:
        return self._result is not None

    @property
    def result(self) -> Result:
        """The result of a response that has ended."""
        assert self._result is not None
        return self._result

    def tail(self, count: int) -> list[int]:
        """Return its last `count` tokens."""
        return self._tokens[-count:]

    def add(self, tokens: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Add tokens that `version` made."""
        first = len(self._tokens)
        self._tokens += tokens
        self._logprobs += logprobs
        if self._spans and self._spans[-1][0] == version:
            first = self._spans.pop()[1]
        if first < len(self._tokens):
            self._spans.append((version, first, len(self._tokens)))
        if self.request.stream:
            self._notify()

    def chose(self, experts: Experts) -> None:
        """Take what was chosen for all tokens but the last, which no pass has taken; what is known stays as it is."""
        done = self.request.done
        tokens = len(self.request.prompt_ids) + self.made
        before = tokens - self.made + len(done.token_ids) - 1 if done else 0
        self._experts = joined(self._experts, with_missing(experts, tokens), before)

    @property
    def grew(self) -> bool:
        """Whether it has tokens that an earlier attempt had not."""
        return self.made > (len(self.request.done.token_ids) if self.request.done else 0)

    def end(self, finish: Finish, error: str = "") -> None:
        """Make the result; only the first end counts."""
        if self._result is not None:
            return
        tokens, logprobs, spans = tuple(self._tokens), tuple(self._logprobs), tuple(self._spans)
        self._result = Result(tokens, logprobs, spans, finish, error, self._experts)
        self._notify()

    async def items(self) -> AsyncGenerator[Chunk | Result, None]:
        """Yield chunks as they come, none unless the request streams, and then the result."""
        while True:
            changed, result = self._changed, self._result
            if self.request.stream and self._sent < len(self._tokens):
                first, self._sent = self._sent, len(self._tokens)
                yield Chunk(tuple(self._tokens[first:]), tuple(self._logprobs[first:]))
            elif result is not None:
                yield result
                return
            else:
                await changed.wait()

    async def wait(self) -> Result:
        """Return the result once it has ended."""
        while self._result is None:
            await self._changed.wait()
        return self._result

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def join_spans(
    spans: Sequence[tuple[int, int, int]], more: Sequence[tuple[int, int, int]]
) -> list[tuple[int, int, int]]:
    """Return spans with more behind them; neighbours of one version become one, and empty ones go.

    [(3, 0, 5)] and [(3, 5, 8), (4, 8, 9)] become [(3, 0, 8), (4, 8, 9)].
    """
    joined: list[Span] = []
    for version, first, end in (*spans, *more):
        if first == end:
            continue
        if joined and joined[-1][0] == version:
            joined[-1] = (version, joined[-1][1], end)
        else:
            joined.append((version, first, end))
    return joined


def oldest_version(spans: Spans) -> int | None:
    """Return the oldest version that made a token; None of a response without tokens."""
    return min((version for version, _, _ in spans), default=None)
