"""Elasticity: collectors join while there is room for them, and leave with nodes that are drained.

    room ──recruit──▶ admitted ──weights──▶ works ──its node is drained──▶ leaving ──nothing in flight──▶ gone

leaving  it is granted nothing more. What it has in flight it finishes, as long as its node is there; then it hands the
         rest back: those groups have the fate `dropped:recalled`, and their prompts come again elsewhere.
gone     what does not even answer to that is buried, like what a dead collector had (supervisor.py).

Invariant: a collector that has left had nothing in flight, and no grant reaches it. There are never more than `most`,
those on their way counted.
"""

from collections.abc import Mapping

import anyio
import structlog
from anyio.abc import TaskGroup

from asyncrl.engine.deployment import Roster
from asyncrl.engine.errors import ActorDied, Overdue
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.types import CollectorLeaving
from asyncrl.engine.loop.collectors import Collectors, Member
from asyncrl.engine.loop.groups import Groups
from asyncrl.engine.loop.listener import Listener
from asyncrl.engine.loop.supervisor import Supervisor

log = structlog.get_logger()

LOOK_EVERY_S = 2.0
"""Ray tells of nodes that come and are drained only who asks."""

HAND_BACK_S = 10.0
"""How long before its node ends a collector hands back what it has in flight, and how long it may take for that."""

RECRUITS = "recruits"


class Elasticity:
    """Looks after the roster of a run that may have up to `most` collectors."""

    def __init__(
        self,
        roster: Roster,
        most: int,
        *,
        collectors: Collectors,
        supervisor: Supervisor,
        groups: Groups,
        events: EventLog,
    ) -> None:
        self._roster = roster
        self._most = most
        self._collectors = collectors
        self._supervisor = supervisor
        self._groups = groups
        self._events = events
        self._leaving: set[str] = set()
        self._recruiting = False
        self._pause_over_at = 0.0

    async def run(self, tasks: TaskGroup, listener: Listener) -> None:
        """Follow the nodes until cancelled; those who join run in `tasks`."""
        async with anyio.create_task_group() as own:
            while True:
                self._send_away(await self._roster.look(), own)
                if self._wants_more:
                    self._recruiting = True
                    own.start_soon(self._recruit, tasks, listener)
                await anyio.sleep(LOOK_EVERY_S)

    @property
    def _wants_more(self) -> bool:
        there = len(self._collectors.all()) + len(self._supervisor.being_restarted)
        return not self._recruiting and there < self._most and self._events.now >= self._pause_over_at

    async def _recruit(self, tasks: TaskGroup, listener: Listener) -> None:
        try:
            handle = await self._roster.recruit()
        except (ActorDied, Overdue) as error:
            pause_s = self._supervisor.restarts_of(RECRUITS).take()
            self._pause_over_at = self._events.now + pause_s
            log.warning("a collector that was to join did not come up", why=str(error), next_try_s=pause_s)
        else:
            if handle is not None:
                self._supervisor.admit(handle, tasks, listener)
        finally:
            self._recruiting = False

    def _send_away(self, drained: Mapping[str, float], tasks: TaskGroup) -> None:
        for name, left_s in drained.items():
            member = self._collectors.get(name)
            if member is not None and name not in self._leaving:
                self._leaving.add(name)
                tasks.start_soon(self._let_finish, member, left_s)

    async def _let_finish(self, member: Member, left_s: float) -> None:
        """Have a collector finish what it has, or hand it back, and let it leave."""
        name, patience_s = member.name, max(0.0, left_s - HAND_BACK_S)
        limited = patience_s < float("inf")
        self._supervisor.give_up(name)
        self._events.append(CollectorLeaving(collector=name, seconds=round(patience_s, 3) if limited else None))
        log.info("a collector is to leave, because its node is drained", collector=name, finishes_within_s=patience_s)
        if not await self._ends(member, patience_s):
            groups = self._groups.of_collector(name)
            log.warning("a collector hands back groups that it has not finished", collector=name, groups=groups)
            self._groups.recall(groups)
            with anyio.move_on_after(HAND_BACK_S):
                await self._collectors.cancel(name, groups)
            if not await self._ends(member, HAND_BACK_S):
                member.report(ActorDied(f"{name} did not hand back its groups within {HAND_BACK_S:g} s", actor=name))
                return
        member.dismiss()

    async def _ends(self, member: Member, limit_s: float) -> bool:
        """Wait until nothing is in flight there; what a dead one had is buried meanwhile."""
        return await self._groups.changed.wait_at_most(lambda: not self._groups.of_collector(member.name), limit_s)
