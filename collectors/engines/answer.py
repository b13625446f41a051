"""What an engine elsewhere has given to a request so far, behind what an earlier attempt left."""

from collections.abc import Sequence

from asyncrl.collectors.engines.base import Chunk, Finish, Request, Result, Spans
from asyncrl.collectors.engines.stop_text import Text, completing, tail_tokens


class Answer:
    """The tokens of one request so far; in their `text` stop strings are looked for."""

    def __init__(self, request: Request, text: Text | None = None) -> None:
        done = request.done
        self._request = request
        self._token_ids: list[int] = list(done.token_ids) if done else []
        self._logprobs: list[float] = list(done.logprobs) if done else []
        self._spans: Spans = done.spans if done else ()
        self._text = text
        self._ended = False
        if self._token_ids:
            # An earlier attempt may have ended by itself: nothing is to come behind that.
            done_ids, self._token_ids = self._token_ids, []
            self._until_stop(done_ids)
            self._token_ids = done_ids

    @property
    def ended(self) -> bool:
        """Whether a stop string or a stop id is there: what comes after it is not taken."""
        return self._ended

    @property
    def prompt_ids(self) -> list[int]:
        """What the engine is given: the prompt and, behind it, the tokens there are."""
        return [*self._request.prompt_ids, *self._token_ids]

    @property
    def left(self) -> int:
        """How many tokens the budget has left; those of an earlier attempt count."""
        return self._request.sampling.max_new_tokens - len(self._token_ids)

    @property
    def seed(self) -> int:
        """The seed for the tokens to come, of 63 bits: a continuation must not draw its first numbers again."""
        return (self._request.seed + 0x9E3779B97F4A7C15 * len(self._token_ids)) % 2**63

    @property
    def untold(self) -> int:
        """How many of the last tokens are of a version that was not told yet."""
        return len(self._token_ids) - (self._spans[-1][2] if self._spans else 0)

    def fault(self, max_length: int) -> str:
        """Say why an engine of so many positions cannot serve this request; empty if it can."""
        prompt, new = len(self._request.prompt_ids), self._request.sampling.max_new_tokens
        if not prompt:
            return "the prompt has no tokens"
        if prompt + new > max_length:
            return f"{prompt} prompt tokens and {new} new ones do not fit the engine's {max_length} positions"
        if self._request.sampling.stop_strings and self._text is None:
            return "stop strings need a tokenizer: give the engine the `text` of tokens"
        return ""

    def take(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> Chunk | None:
        """Append tokens up to the end of a stop string; return those taken, None if there are none.

        ValueError if a log-probability is missing, or there are more tokens than were asked for.
        """
        if len(token_ids) > self.left:
            raise ValueError(f"the engine gave {len(token_ids)} tokens, and {self.left} were asked for")
        if len(token_ids) != len(logprobs):
            raise ValueError(f"the engine gave {len(token_ids)} tokens and {len(logprobs)} log-probabilities")
        first = len(self._token_ids)
        kept = 0 if self._ended else self._until_stop(token_ids)
        self._token_ids += map(int, token_ids[:kept])
        self._logprobs += map(float, logprobs[:kept])
        if len(self._token_ids) == first:
            return None
        return Chunk(tuple(self._token_ids[first:]), tuple(self._logprobs[first:]))

    def take_spans(self, spans: Spans) -> None:
        """Say of which versions the tokens since the last call are: `spans` count from the first of them.

        ValueError for spans that leave a token out, or name one twice.
        """
        first, end = self._spans[-1][2] if self._spans else 0, len(self._token_ids)
        for version, begins, ends in spans:
            here, there = min(first + begins, end), min(first + ends, end)
            if here == there:
                continue
            if not here == (self._spans[-1][2] if self._spans else 0) < there:
                raise ValueError(f"the engine's spans do not follow each other: {spans}")
            if self._spans and self._spans[-1][0] == version and self._spans[-1][2] == here:
                self._spans = (*self._spans[:-1], (version, self._spans[-1][1], there))
            else:
                self._spans = (*self._spans, (version, here, there))

    def result(self, finish: Finish, error: str = "") -> Result:
        """Return all there is, that of earlier attempts included; ValueError if a token's version was not told."""
        if self.untold:
            raise ValueError(f"the engine did not tell the version of {self.untold} of {len(self._token_ids)} tokens")
        return Result(tuple(self._token_ids), tuple(self._logprobs), self._spans, finish, error)

    def _until_stop(self, new: Sequence[int]) -> int:
        """Return how many of the next tokens there are up to the one that ends the response."""
        sampling = self._request.sampling
        ends = [n + 1 for n, token in enumerate(new) if token in sampling.stop_ids][:1]
        if sampling.stop_strings and self._text is not None:
            before = self._token_ids[-tail_tokens(sampling.stop_strings) :]
            completed = completing(self._text, before, new, sampling.stop_strings)
            ends += [] if completed is None else [completed]
        self._ended = bool(ends)
        return min(ends, default=len(new))
