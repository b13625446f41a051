"""Prompts that fail again and again (such as one too long for the model) are left out for the rest of a run.

Invariant: a prompt that has failed `after` times, without a good group in between, is never granted again.
"""

from typing import NoReturn

import structlog

from asyncrl.engine.checkpoint.state import RetirementState
from asyncrl.engine.errors import GenerationError
from asyncrl.engine.records import Prompt

log = structlog.get_logger()


class Retirement:
    """Counts failures by prompt. `prompts` is the number of the run's prompts; with `after` None none is retired."""

    def __init__(self, after: int | None, *, prompts: int) -> None:
        self._after = after
        self.prompts = prompts
        self._failures: dict[int | str, int] = {}
        self._last = ""
        self.retired: dict[int | str, int] = {}
        """By prompt: how often it was passed over since, once per epoch."""

    def succeeded(self, prompt: int | str) -> None:
        """Note a good group: the failures before it were not the fault of the prompt."""
        self._failures.pop(prompt, None)

    def failed(self, prompt: Prompt, reason: str, error: str) -> None:
        """Count a failed group."""
        times = self._failures[prompt.id] = self._failures.get(prompt.id, 0) + 1
        if self._after is None or times < self._after or prompt.id in self.retired:
            return
        self.retired[prompt.id] = 0
        log.warning(
            "a prompt is left out for the rest of the run",
            prompt=prompt.id,
            dataset=prompt.dataset,
            failures=times,
            reason=reason,
            error=error,
        )
        self._last = f"prompt {prompt.id!r}, for {reason}:\n{error}"

    def passes_over(self, prompt: Prompt) -> bool:
        """Return whether the prompt whose turn it is was retired, and count its turn.

        GenerationError, with the last cause, if no prompt is left: otherwise endless epochs would be passed over.
        """
        if prompt.id not in self.retired:
            return False
        if len(self.retired) == self.prompts:
            self.none_left()
        self.retired[prompt.id] += 1
        log.info("a prompt that was left out is passed over", prompt=prompt.id, times=self.retired[prompt.id])
        return True

    def state(self) -> RetirementState:
        """Return what was counted, for `restore`."""
        return RetirementState(list(self._failures.items()), list(self.retired.items()), self._last)

    def restore(self, state: RetirementState) -> None:
        """Go on from a checkpoint."""
        self._failures, self.retired, self._last = dict(state.failures), dict(state.retired), state.last

    def none_left(self) -> NoReturn:
        """Raise the GenerationError of a run whose prompts are all retired."""
        raise GenerationError(
            f"no prompt is left: each of {len(self.retired)} has failed {self._after} times (task.retire_after); "
            f"the last, {self._last}"
        )
