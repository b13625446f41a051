"""A response of several turns as token ids: what was sampled, and what was put between.

Invariant: tokens are only ever appended, so what was generated is never tokenised again, and each turn is generated
from exactly the tokens that are trained on (re-tokenising a text need not give the ids that were sampled).
"""

from collections.abc import Sequence
from dataclasses import replace

from asyncrl.collectors.engines.base import Result
from asyncrl.collectors.engines.expert_record import Experts, joined, with_missing
from asyncrl.collectors.engines.response import join_spans
from asyncrl.collectors.generators.base import Completion
from asyncrl.collectors.outcome import Outcome
from asyncrl.engine.errors import AsyncRLError, GenerationError


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
        self._experts: Experts | None = None

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
        if result.experts is not None:
            # A later turn's prompt was routed again; earlier tokens were sampled with the first choice.
            known = 0 if self._experts is None else len(self._experts) - 1
            self._experts = joined(self._experts, result.experts, known)
        if result.token_ids:
            self._generated.append((first, len(self._ids)))

    def put(self, ids: Sequence[int]) -> None:
        """Append tokens that the model did not generate: of the version of the token before, log-probability 0."""
        first = len(self._ids)
        self._ids += ids
        self._logprobs += [0.0] * len(ids)
        if self._spans:
            self._spans = join_spans(self._spans, [(self._spans[-1][0], first, len(self._ids))])

    def completion(self, *, finished: bool, outcome: Outcome | None, with_prompt: bool = False) -> Completion:
        """Return all of it; `with_prompt` if the prompt is not the group's."""
        return Completion(
            tuple(self._ids),
            tuple(self._logprobs),
            tuple(self._spans),
            finished,
            generated=tuple(self._generated),
            outcome=outcome,
            prompt_ids=self._prompt if with_prompt else None,
            experts=None if self._experts is None else with_missing(self._experts, len(self.ids)),
        )


def with_common_prompt(completions: Sequence[Completion]) -> list[Completion]:
    """Return completions with one prompt: what those that have prompts of their own all begin with.

    The rest of each prompt is context in front of its response. Prompts (5, 6, 7) and (5, 6, 8) with responses (1) and
    (2) become the prompt (5, 6) with responses (7, 1) and (8, 2), of which 1 and 2 are generated. GenerationError if
    they do not begin with the same token.
    """
    prompts = [c.prompt_ids for c in completions if c.prompt_ids is not None]
    if not prompts:
        return list(completions)
    common = 0
    for column in zip(*prompts, strict=False):
        if len(set(column)) > 1:
            break
        common += 1
    if not common:
        raise GenerationError(
            "the first requests of a group's samples begin with different tokens; one must be the same"
        )
    return [c if c.prompt_ids is None else _moved(c, c.prompt_ids, common) for c in completions]


def _moved(completion: Completion, prompt: tuple[int, ...], common: int) -> Completion:
    """Return a completion with the prompt's tokens from `common` on in front of its response."""
    n = len(prompt) - common
    spans = [(version, first + n, end + n) for version, first, end in completion.spans]
    return replace(
        completion,
        prompt_ids=prompt[:common],
        token_ids=(*prompt[common:], *completion.token_ids),
        logprobs=(*[0.0] * n, *completion.logprobs),
        spans=tuple([(spans[0][0], 0, spans[0][2]), *spans[1:]] if spans else ()),
        generated=tuple((first + n, end + n) for first, end in completion.generated or ()),
    )
