"""A fake generator that swaps weights within a response and reports which version made which tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import anyio

from asyncrl.collectors.generators.base import Completion, GroupRequest
from asyncrl.engine.model.tokenizer import CharTokenizer
from asyncrl.engine.testing.fakes import FakeGenerator
from asyncrl.engine.weights.base import State


@dataclass(slots=True)
class SpanningGenerator(FakeGenerator):
    """Tokens come evenly over a call's `seconds`; each has the version in force when it came."""

    clock: Callable[[], float] = lambda: 0.0
    _swaps: list[tuple[float, int]] = field(default_factory=list)

    def anew(self) -> "SpanningGenerator":
        made = replace(self, calls=0, running=0, version=0, updates=[], loaded_at={}, loading=None, waking=None)
        made._swaps = []
        return made

    async def generate(self, request: GroupRequest) -> Sequence[Completion]:
        request.turn(True)
        call = self.calls
        self.calls += 1
        started = self.clock()
        before = self.version
        swaps_before = len(self._swaps)
        seconds = self.seconds(call)
        await anyio.sleep(seconds)
        self.fail(call)
        tokens = self.length(call)
        tokenizer = CharTokenizer()
        spans = []
        version, first = before, 0
        for when, newer in self._swaps[swaps_before:]:
            at = min(tokens, round(tokens * (when - started) / seconds)) if seconds else tokens
            if at > first:
                spans.append((version, first, at))
                first = at
            version = newer
        if first < tokens:
            spans.append((version, first, tokens))
        out = []
        for index in range(request.size):
            ids = (*tokenizer.encode(str(index % 10) * (tokens - 1)), tokenizer.eos_id)
            out.append(Completion(ids, (-1.0,) * tokens, tuple(spans), True))
        return out

    async def update_weights(self, version: int, state: State) -> None:
        await FakeGenerator.update_weights(self, version, state)
        self._swaps.append((self.clock(), version))
