"""How many groups a batch still asks for. It needs `groups_per_step` groups judged, or with dynamic sampling kept.

Example, at 4 groups per step and 3 attempts: a batch may judge 12 groups. If it has judged 10 and kept 2, it asks for 2
more: that many are missing, and that many are left of the budget.
"""

from collections import Counter

import structlog

from asyncrl.engine.errors import RefillExhausted
from asyncrl.engine.loop.batch import Batch
from asyncrl.filters.builtin.dynamic_sampling import Refill

log = structlog.get_logger()


class RefillBudget:
    """The policy of `dynamic_sampling`, if the chain has it. Batches that were given up count towards the budget."""

    def __init__(self, policy: Refill | None, *, groups_per_step: int) -> None:
        self._policy = policy
        self._groups_per_step = groups_per_step
        self._handed_on: list[Batch] = []

    def hand_on(self, batch: Batch) -> None:
        """Note a batch that is complete."""
        # Without `error` the user wants the run to go on, so each batch has attempts of its own.
        if self._policy is not None and self._policy.on_exhausted == "error":
            self._handed_on.append(batch)

    @property
    def handed_on(self) -> list[Batch]:
        """The complete batches that may count towards the budget."""
        return self._handed_on

    def wanted(self, batch: Batch) -> int:
        """Return how many groups to judge next; 0 if the batch is complete. RefillExhausted if so configured."""
        policy, per_step = self._policy, self._groups_per_step
        if policy is None:
            return per_step - len(batch.judged)
        missing = per_step - len(batch.kept)
        if missing <= 0 or batch.partial:
            return 0
        spenders = [*self._in_vain(), batch]
        budget = policy.max_attempts * per_step - sum(len(one.judged) for one in spenders)
        if budget > 0:
            return min(missing, budget)
        if policy.on_exhausted == "error":
            raise RefillExhausted(
                f"dynamic sampling used up its {policy.max_attempts} attempts: {self._spent(spenders)}. "
                "Raise max_attempts, or set on_exhausted of the dynamic_sampling filter"
            )
        if policy.on_exhausted == "train_partial":
            batch.partial = True
            return 0
        attempt = per_step - len(batch.judged) % per_step
        if attempt == per_step:
            log.warning("dynamic sampling goes on past its attempts", spent=self._spent(spenders))
        return min(missing, attempt)

    def _in_vain(self) -> list[Batch]:
        """Return the batches since the last one trained that were given up: they have spent attempts too."""
        while any(batch.trained for batch in self._handed_on):
            self._handed_on.pop(0)
        return [batch for batch in self._handed_on if batch.trained is False]

    def _spent(self, spenders: list[Batch]) -> str:
        judged = sum(len(batch.judged) for batch in spenders)
        attempts = sum(batch.attempts(self._groups_per_step) for batch in spenders)
        drops = dict(sum((batch.drops for batch in spenders), Counter()))
        spent = (
            f"{judged} groups judged in {attempts} attempts, {len(spenders[-1].kept)} of {self._groups_per_step} "
            f"kept; dropped: {drops}"
        )
        if len(spenders) > 1:
            masked = dict(sum((batch.masked for batch in spenders), Counter()))
            spent += f", masked samples: {masked}; {len(spenders) - 1} batches before had nothing left to train"
        return spent
