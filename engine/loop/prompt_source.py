"""Prompts in the order in which they are granted: ones that were lost first, then epoch after epoch.

Invariant: a prompt lost to age comes again at most `requeue_tries` times. A recalled one always comes again, and that
does not count as a try. No prompt comes again once the source is closed.
"""

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog

from asyncrl.configs import RunConfig
from asyncrl.engine.checkpoint.state import GrantState, PromptsState, PromptState
from asyncrl.engine.loop.retirement import Retirement
from asyncrl.engine.records import Grant, Prompt, PromptStream
from asyncrl.engine.records.fate import COLLECTOR_DIED, NOT_RESTORED, RECALLED

log = structlog.get_logger()


class Listed(PromptStream):
    """Prompts of a list, for `epochs` passes, or without end for None; each pass is shuffled by (seed, epoch)."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, epochs: int | None) -> None:
        self._prompts = prompts
        self._seed = seed
        self._epochs = epochs
        self._drawn = 0
        self._order: list[Prompt] = []

    @property
    def prompts(self) -> int:
        return len(self._prompts)

    def __next__(self) -> Prompt:
        if not self._prompts:
            raise StopIteration
        epoch, place = divmod(self._drawn, len(self._prompts))
        if self._epochs is not None and epoch >= self._epochs:
            raise StopIteration
        if not self._order or not place:
            self._order = list(self._prompts)
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
        self._drawn += 1
        return self._order[place]

    def state(self) -> dict[str, Any]:
        return {"drawn": self._drawn}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._drawn, self._order = int(state["drawn"]), []

    def same(self, prompt: PromptState) -> Prompt:
        """Return the prompt of the list that a checkpoint names: its fields may hold what JSON cannot."""
        return next((known for known in self._prompts if known.id == prompt.id), prompt.prompt())


@dataclass(frozen=True, slots=True)
class Turn:
    """The next prompt; `retry_of` is the group in which it was lost, `tries` how often it was lost to age."""

    prompt: Prompt
    tries: int = 0
    retry_of: int | None = None


class PromptSource:
    """Gives out turns, from a list of prompts that it shuffles or from a stream. Retired prompts are passed over."""

    def __init__(self, prompts: Sequence[Prompt] | PromptStream, config: RunConfig, retirement: Retirement) -> None:
        self._prompts = (
            prompts
            if isinstance(prompts, PromptStream)
            else Listed(prompts, seed=config.run.seed, epochs=config.task.epochs)
        )
        self._tries = config.rollout.requeue_tries
        self._retirement = retirement
        self._lost: deque[Grant] = deque()
        self._exhausted = False
        self._closed = False

    @property
    def skipped(self) -> Mapping[str, int]:
        """How many records of data sets were left out, by reason."""
        return self._prompts.skipped

    @property
    def more(self) -> bool:
        """Whether another turn may come; True until `next` has looked."""
        return self._gives_lost or not self._exhausted

    def more_may_come(self, *, in_flight: bool) -> bool:
        """Return whether another group can still arrive; `in_flight` says whether any is on its way."""
        return self.more or in_flight

    def next(self) -> Turn | None:
        """Return the next turn; None at the end of the data. GenerationError once every prompt is retired."""
        passed_over = 0
        while True:
            if self._gives_lost:
                lost = self._lost.popleft()
                turn = Turn(lost.prompt, lost.tries + 1, lost.group)
            else:
                prompt = next(self._prompts, None)
                if prompt is None:
                    self._exhausted = True
                    return None
                turn = Turn(prompt)
            if not self._retirement.passes_over(turn.prompt):
                return turn
            passed_over += 1
            # A stream leaves prompts out, so that not all of those counted can be retired. One that is left comes
            # within two epochs, first in the one and last in the next.
            if passed_over > 2 * self._prompts.prompts and not self._gives_lost:
                self._retirement.none_left()

    def lost(self, grant: Grant, reason: str) -> None:
        """Let a lost prompt come again: up to `requeue_tries` times if it got too old, else always."""
        if reason in (RECALLED, NOT_RESTORED, COLLECTOR_DIED):
            # `next` adds a try, and a recall must not count as one.
            self._lost.append(replace(grant, tries=grant.tries - 1))
        elif grant.tries < self._tries:
            self._lost.append(grant)
        elif self._tries:
            prompt = grant.prompt
            log.warning("a prompt is lost to age for good", prompt=prompt.id, dataset=prompt.dataset, tries=self._tries)

    def state(self) -> PromptsState:
        """Return the place in the data, for `restore`."""
        return PromptsState(self._prompts.prompts, self._prompts.state(), [GrantState.of(lost) for lost in self._lost])

    def restore(self, state: PromptsState) -> None:
        """Go on from a checkpoint over the same prompts."""
        self._prompts.restore(state.stream)
        self._lost.extend(self.grant(lost) for lost in state.lost)

    def grant(self, state: GrantState) -> Grant:
        """Return the grant that a checkpoint tells of."""
        stream = self._prompts
        return state.grant(stream.same(state.prompt) if isinstance(stream, Listed) else state.prompt.prompt())

    def close(self) -> None:
        """From now on no lost prompt comes again, because the run ends. Its last checkpoint keeps them for the next."""
        self._closed = True

    @property
    def _gives_lost(self) -> bool:
        return bool(self._lost) and not self._closed
