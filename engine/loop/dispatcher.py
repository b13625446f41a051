"""The dispatcher: prompts to grants, as run-ahead allows.

Invariant: a group is dispatched, and takes capacity, before a collector hears of it.
"""

from collections.abc import Callable
from functools import partial

import anyio
from anyio.abc import TaskGroup

from asyncrl.configs import RunConfig
from asyncrl.engine.loop.balance import Balance
from asyncrl.engine.loop.collectors import Collectors
from asyncrl.engine.loop.groups import Groups
from asyncrl.engine.loop.prompt_source import PromptSource
from asyncrl.engine.loop.versions import Versions
from asyncrl.engine.records import Grant


class Dispatcher:
    """Grants groups to collectors. `held_up`, for `rollout.pacing`, tells whether a batch waits for the trainer."""

    def __init__(
        self,
        config: RunConfig,
        collectors: Collectors,
        prompts: PromptSource,
        *,
        groups: Groups,
        versions: Versions,
        balance: Balance,
        held_up: Callable[[], bool],
    ) -> None:
        self._config = config
        self._collectors = collectors
        self._prompts = prompts
        self._groups = groups
        self._versions = versions
        self._balance = balance
        self._held_up = held_up
        self._next_group = 0

    @property
    def next_group(self) -> int:
        """The number of the next group."""
        return self._next_group

    def restore(self, next_group: int) -> None:
        """Go on numbering groups from a checkpoint."""
        self._next_group = next_group

    async def run(self) -> None:
        """Dispatch prompts while there is capacity; many groups in one call to a collector."""
        # Each grant has a task: otherwise a collector that is slow to take its groups would keep the others waiting.
        async with anyio.create_task_group() as granting:
            await self._dispatch(granting)

    async def cancel_stale(self) -> None:
        """At each new version, cancel the groups that no later batch could train."""
        seen = -1
        while True:
            await self._versions.changed.wait_at_most(
                partial(self._version_beyond, seen), self._config.supervision.starve_timeout_s
            )
            seen = self._versions.next_batch
            for name, groups in self._groups.doomed(seen - self._config.rollout.max_staleness).items():
                await self._collectors.cancel(name, groups)

    async def _dispatch(self, granting: TaskGroup) -> None:
        while True:
            # The front end keeps the deadline: if no capacity comes back, no batch becomes complete there.
            await self._groups.changed.wait_at_most(self._may_grant, self._config.supervision.starve_timeout_s)
            grants: dict[str, list[Grant]] = {}
            while self._may_grant():
                turn = self._prompts.next()
                if turn is None:
                    self._groups.changed.notify()
                    break
                number, self._next_group = self._next_group, self._next_group + 1
                grant = Grant(number, turn.prompt, self._config.rollout.group_size, self._config.run.seed, turn.tries)
                name = self._balance.choose()
                self._groups.dispatch(grant, name, served=self._versions.served[name], retry_of=turn.retry_of)
                grants.setdefault(name, []).append(grant)
            for name, granted in grants.items():
                # The process that was chosen: one that comes in its place must not be granted what died with it.
                granting.start_soon(self._collectors[name].grant, granted)

    def _may_grant(self) -> bool:
        waiting = self._held_up() or self._groups.buffered >= self._config.rollout.groups_per_step
        paced = self._config.rollout.pacing and waiting
        return self._prompts.more and self._groups.run_ahead.free > 0 and self._balance.any_left and not paced

    def _version_beyond(self, seen: int) -> bool:
        return self._versions.next_batch > seen
