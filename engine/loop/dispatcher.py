"""The dispatcher: prompts to grants, as run-ahead allows; prompts lost to age come again.

Invariant: a group is dispatched, and takes capacity, before a collector hears of it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

import anyio
import structlog
from anyio.abc import TaskGroup

from asyncrl.configs import RunConfig
from asyncrl.engine.deployment import CollectorHandle
from asyncrl.engine.loop.balance import Balance
from asyncrl.engine.loop.groups import Groups
from asyncrl.engine.loop.prompt_source import prompt_source
from asyncrl.engine.loop.versions import Versions
from asyncrl.engine.records import Grant, Prompt

log = structlog.get_logger()


class Dispatcher:
    """Grants groups to collectors. `ended` says that the run is at its end: nothing is issued again then.

    `passes_over` says that a prompt was retired.
    """

    def __init__(
        self,
        config: RunConfig,
        collectors: Sequence[CollectorHandle],
        prompts: Sequence[Prompt],
        *,
        groups: Groups,
        versions: Versions,
        passes_over: Callable[[Prompt], bool],
        balance: Balance,
        ended: Callable[[], bool],
    ) -> None:
        self._config = config
        self._collectors = {collector.name: collector for collector in collectors}
        self._prompts = prompts
        self._groups = groups
        self._versions = versions
        self._passes_over = passes_over
        self._balance = balance
        self._ended = ended
        self._source_done = False
        self._requeue: deque[Grant] = deque()
        self._batch_waits = False

    async def run(self) -> None:
        """Dispatch prompts while there is capacity; many groups in one call to a collector."""
        # Beside one another: a collector that is slow to take its groups keeps no other waiting.
        async with anyio.create_task_group() as granting:
            await self._dispatch(granting)

    async def _dispatch(self, granting: TaskGroup) -> None:
        run = self._config.run
        source = prompt_source(self._prompts, seed=run.seed, epochs=self._config.task.epochs)
        numbers = count()
        while True:
            # Its deadline is the front end's: without capacity coming back no batch is complete.
            await self._groups.changed.wait_at_most(self._may_grant, self._config.supervision.starve_timeout_s)
            grants: dict[str, list[Grant]] = {}
            while self._may_grant():
                lost = self._requeue.popleft() if self._requeue else None
                prompt = next(source, None) if lost is None else lost.prompt
                if prompt is None:
                    self._source_done = True
                    self._groups.changed.notify()
                    break
                if self._passes_over(prompt):
                    continue
                tries = 0 if lost is None else lost.tries + 1
                grant = Grant(next(numbers), prompt, self._config.rollout.group_size, run.seed, tries)
                name = self._balance.choose()
                retry_of = None if lost is None else lost.group
                self._groups.dispatch(grant, name, served=self._versions.served[name], retry_of=retry_of)
                grants.setdefault(name, []).append(grant)
            for name, granted in grants.items():
                granting.start_soon(self._collectors[name].grant, granted)

    async def cancel_stale(self) -> None:
        """Cancel what no batch to come could train any more, at each new version."""
        seen = -1
        while True:
            await self._versions.changed.wait_at_most(
                partial(self._version_beyond, seen), self._config.supervision.starve_timeout_s
            )
            seen = self._versions.next_batch
            doomed: dict[str, list[int]] = {}
            for group in self._groups.in_flight:
                if seen - self._groups.stamps[group] > self._config.rollout.max_staleness:
                    doomed.setdefault(self._groups.collectors[group], []).append(group)
            for name, groups in doomed.items():
                await self._collectors[name].cancel(groups)

    def more_may_come(self) -> bool:
        """Say whether another group can still arrive."""
        return not self._source_done or bool(self._requeue) or bool(self._groups.in_flight)

    def lost_to_age(self, grant: Grant) -> None:
        """Issue again the prompt of a group that got too old, as often as allowed."""
        tries = self._config.rollout.requeue_tries
        if grant.tries < tries and not self._ended():
            self._requeue.append(grant)
        elif tries:
            prompt = grant.prompt
            log.warning("a prompt is lost to age for good", prompt=prompt.id, dataset=prompt.dataset, tries=tries)

    def batch_waits(self, waits: bool) -> None:
        """Note whether a whole batch waits for the trainer to take it."""
        self._batch_waits = waits
        self._groups.changed.notify()

    def _may_grant(self) -> bool:
        waiting = self._batch_waits or len(self._groups.buffered) >= self._config.rollout.groups_per_step
        paced = self._config.rollout.pacing and waiting
        more = bool(self._requeue) or not self._source_done
        return more and self._groups.run_ahead.free > 0 and not paced

    def _version_beyond(self, seen: int) -> bool:
        return self._versions.next_batch > seen
