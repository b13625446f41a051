"""What actors say, heard in order: put notices, failures, acknowledgements, and their death.

Invariant: the loop hears each message once; an actor that does not answer in time counts as dead.
"""

import anyio
import structlog

from asyncrl.configs import RunConfig
from asyncrl.engine.deployment import Actor
from asyncrl.engine.errors import ActorDied, GenerationError
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.types import Acknowledged
from asyncrl.engine.lifecycle.deaths import Deaths
from asyncrl.engine.loop.engine_uses import EngineUses
from asyncrl.engine.loop.groups import Groups
from asyncrl.engine.loop.put_traffic import PutTraffic
from asyncrl.engine.loop.retirement import Retirement
from asyncrl.engine.loop.versions import Versions
from asyncrl.engine.records import Grant
from asyncrl.engine.records.fate import CANCELLED, QUEUE_TIMEOUT
from asyncrl.engine.records.group import FAILED
from asyncrl.engine.records.message import GroupFailure, Message, PutNotice, Served

log = structlog.get_logger()


class Listener:
    """Tells the registers of groups and versions what actors say."""

    def __init__(
        self,
        config: RunConfig,
        *,
        groups: Groups,
        versions: Versions,
        retirement: Retirement,
        engine_uses: EngineUses,
        put_traffic: PutTraffic,
        deaths: Deaths,
        events: EventLog,
    ) -> None:
        self._limit_s = config.supervision.answer_timeout_s
        self._collector = config.collector
        self._groups = groups
        self._versions = versions
        self._retirement = retirement
        self._engine_uses = engine_uses
        self._put_traffic = put_traffic
        self._deaths = deaths
        self._events = events
        self._failed_in_a_row: dict[str, list[int | str]] = {}

    async def listen(self, actor: Actor) -> None:
        """Listen until cancelled. Raises ActorDied, the actor's own error, or GenerationError after many failures."""
        seen = 0
        while True:
            with self._deaths.of(actor.name):
                try:
                    with anyio.fail_after(self._limit_s):
                        messages = await actor.events(seen, self._limit_s / 3)
                except TimeoutError:
                    raise ActorDied(
                        f"{actor.name} has answered nothing for {self._limit_s:g} s", actor=actor.name
                    ) from None
            if self._deaths.survived(actor.name):
                return  # It was let go meanwhile, and what it serves counts no more.
            for number, message in messages:
                seen = number
                self._hear(actor.name, message)

    def forget(self, name: str) -> None:
        """Forget the failures of an actor that died: they say nothing of its successor."""
        self._failed_in_a_row.pop(name, None)

    def _hear(self, name: str, message: Message) -> None:
        match message:
            case PutNotice(group, seconds, errors, use, traffic):
                self._put_traffic.report(traffic)
                if use is not None:
                    self._engine_uses.report(name, use)
                self._failed_in_a_row[name] = []
                self._retirement.succeeded(group.prompt)
                if errors:
                    failed = group.statuses.count(FAILED)
                    log.warning("samples failed", group=group.group, prompt=group.prompt, failed=failed, errors=errors)
                self._groups.arrive(group, seconds=seconds)
            case Served(version):
                self._versions.acknowledge(name, version)
                self._events.append(Acknowledged(generator=name, version=version))
            case GroupFailure(group, reason, error):
                grant = self._groups.in_flight(group)
                self._groups.fail(group, reason, error)
                if reason != CANCELLED and grant is not None:
                    self._count_failure(name, grant, reason, error)

    def _count_failure(self, name: str, grant: Grant, reason: str, error: str) -> None:
        """Raise after too many failures in a row, unless all are of one prompt, which will be retired."""
        row = self._failed_in_a_row.setdefault(name, [])
        row.append(grant.prompt.id)
        several = len(set(row)) > 1 or self._retirement.prompts == 1
        if self._collector.on_error == "abort" or (len(row) >= self._collector.max_failures_in_a_row and several):
            # Views and summaries show the first line alone.
            cause = error.strip().rpartition("\n")[2]
            raise GenerationError(
                f"{len(row)} groups in a row failed in {name}; the last, group {grant.group}, for {reason}: {cause}\n"
                f"{error}"
            )
        if reason != QUEUE_TIMEOUT:
            self._retirement.failed(grant.prompt, reason, error)
