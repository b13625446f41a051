"""A response of several turns as token ids: what was sampled, and what was put between.

Invariant: tokens are only ever appended, so what was generated is never tokenised again, and each turn is generated
from exactly the tokens that are trained on (re-tokenising a text need not give the ids that were sampled).
"""

from collections.abc import Sequence

from asyncrl.collectors.engines.base import Result
from asyncrl.collectors.engines.response import join_spans
from asyncrl.collectors.generators.base import Completion
from asyncrl.collectors.outcome import Outcome
from asyncrl.engine.errors import AsyncRLError


class HistoryMismatch(AsyncRLError, RuntimeError):
    """A turn was generated from other tokens than its transcript has."""


class Transcript:
    """Begins with the prompt's ids."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._prompt = tuple(prompt_ids)
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[tuple[int, int, int]] = []
        self._generated: list[tuple[int, int]] = []

    @property
    def ids(self) -> tuple[int, ...]:
        """What the next turn is generated from."""
        return (*self._prompt, *self._ids)

    @property
    def tokens(self) -> int:
        """How many tokens the response has so far."""
        return len(self._ids)

    @property
    def last(self) -> int | None:
        """The last token of the response."""
        return self._ids[-1] if self._ids else None

    def generated(self, asked: Sequence[int], result: Result) -> None:
        """Append a turn; HistoryMismatch if it was generated from other ids than those here."""
        if tuple(asked) != self.ids:
            at = next((i for i, (a, b) in enumerate(zip(asked, self.ids, strict=False)) if a != b), None)
            raise HistoryMismatch(
                f"a turn was generated from {len(asked)} tokens, and its history has {len(self.ids)}; they differ from "
                f"token {min(len(asked), len(self.ids)) if at is None else at} on"
            )
        first = len(self._ids)
        self._ids += result.token_ids
        self._logprobs += result.logprobs
        shifted = [(version, first + begin, first + end) for version, begin, end in result.spans]
        self._spans = join_spans(self._spans, shifted)
        if result.token_ids:
            self._generated.append((first, len(self._ids)))

    def put(self, ids: Sequence[int]) -> None:
        """Append tokens that the model did not generate: of the version of the token before, log-probability 0."""
        first = len(self._ids)
        self._ids += ids
        self._logprobs += [0.0] * len(ids)
        if self._spans:
            self._spans = join_spans(self._spans, [(self._spans[-1][0], first, len(self._ids))])

    def completion(self, *, finished: bool, outcome: Outcome | None) -> Completion:
        """Return all of it."""
        return Completion(
            tuple(self._ids),
            tuple(self._logprobs),
            tuple(self._spans),
            finished,
            generated=tuple(self._generated),
            outcome=outcome,
        )
