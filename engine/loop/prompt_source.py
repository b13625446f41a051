"""Prompts in the order in which they are granted: ones that were lost first, then epoch after epoch.

Invariant: a prompt lost to age comes again at most `requeue_tries` times. A recalled one always comes again, and that
does not count as a try. No prompt comes again once the source is closed.
"""

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import structlog

from asyncrl.configs import RunConfig
from asyncrl.engine.loop.retirement import Retirement
from asyncrl.engine.records import Grant, Prompt
from asyncrl.engine.records.fate import RECALLED

log = structlog.get_logger()


def prompt_source(prompts: Sequence[Prompt], *, seed: int, epochs: int | None) -> Iterator[Prompt]:
    """Yield prompts for `epochs` passes, or without end for None; each pass is shuffled by (seed, epoch)."""
    epoch = 0
    while prompts and (epochs is None or epoch < epochs):
        order = list(prompts)
        random.Random(f"{seed}/{epoch}").shuffle(order)
        yield from order
        epoch += 1


@dataclass(frozen=True, slots=True)
class Turn:
    """The next prompt; `retry_of` is the group in which it was lost, `tries` how often it was lost to age."""

    prompt: Prompt
    tries: int = 0
    retry_of: int | None = None


class PromptSource:
    """Gives out turns. Retired prompts are passed over."""

    def __init__(self, prompts: Sequence[Prompt], config: RunConfig, retirement: Retirement) -> None:
        self._prompts = prompt_source(prompts, seed=config.run.seed, epochs=config.task.epochs)
        self._tries = config.rollout.requeue_tries
        self._retirement = retirement
        self._lost: deque[Grant] = deque()
        self._exhausted = False
        self._closed = False

    @property
    def more(self) -> bool:
        """Whether another turn may come; True until `next` has looked."""
        return bool(self._lost) or not self._exhausted

    def more_may_come(self, *, in_flight: bool) -> bool:
        """Return whether another group can still arrive; `in_flight` says whether any is on its way."""
        return self.more or in_flight

    def next(self) -> Turn | None:
        """Return the next turn; None at the end of the data. GenerationError once every prompt is retired."""
        while True:
            if self._lost:
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

    def lost(self, grant: Grant, reason: str) -> None:
        """Let a lost prompt come again: always if it was recalled, up to `requeue_tries` times if it got too old."""
        if reason == RECALLED:
            self._recall(grant)
        elif grant.tries < self._tries and not self._closed:
            self._lost.append(grant)
        elif self._tries:
            prompt = grant.prompt
            log.warning("a prompt is lost to age for good", prompt=prompt.id, dataset=prompt.dataset, tries=self._tries)

    def close(self) -> None:
        """From now on no lost prompt comes again, because the run ends."""
        self._closed = True

    def _recall(self, grant: Grant) -> None:
        if not self._closed:
            # `next` adds a try, and a recall must not count as one.
            self._lost.append(replace(grant, tries=grant.tries - 1))
