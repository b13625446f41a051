"""The publisher: new weights to every generator.

Invariant: a failed publish leaves what is served as it was; it is repeated, or ends the run. One version at a time is
brought to anybody, so that whoever joins serves what was published last.
"""

from collections.abc import Callable, Mapping
from typing import Any

import anyio
import structlog

from asyncrl.configs.sections.trainer import Trainer
from asyncrl.engine.deployment import WeightSource
from asyncrl.engine.errors import ActorDied, Overdue
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.types import Published, PublishFailed, PublishStarted
from asyncrl.engine.loop.collectors import Collectors, Member
from asyncrl.engine.loop.versions import Versions
from asyncrl.engine.records.ending import first_cause
from asyncrl.engine.weights.base import Offer, Sent

log = structlog.get_logger()


class Publisher:
    """Brings generators to the trainer's versions, one version after the other."""

    def __init__(
        self,
        config: Trainer,
        collectors: Collectors,
        source: WeightSource,
        *,
        versions: Versions,
        events: EventLog,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._collectors = collectors
        self._source = source
        self._versions = versions
        self._events = events
        self._clock = clock
        self._turn = anyio.Lock(fast_acquire=True)
        self._last: tuple[int, Sent] | None = None

    async def publish(self, version: int, sent: Sent) -> None:
        """Bring every generator to `version`; a failed try leaves P as it was and is repeated."""
        async with self._turn:
            self._last = version, sent
            await self._publish(version, sent)

    async def catch_up(self, member: Member) -> int:
        """Bring a collector that is to join to the version that was published last; return that version.

        ActorDied, in its name, if it does not serve it within `trainer.publish_timeout_s`, once it is its turn.
        """
        async with self._turn:
            assert self._last is not None, "nobody joins before the first publish"
            (version, sent), limit_s = self._last, self._config.publish_timeout_s
            why = f"not within {limit_s:g} s (trainer.publish_timeout_s)"
            with anyio.move_on_after(limit_s):
                for _ in range(self._config.publish_tries):
                    try:
                        await self._bring(member, version, sent)
                        member.joined = True
                        return version
                    except ExceptionGroup as error:  # Of the load, or of the meeting for it.
                        why = repr(first_cause(error))
            raise ActorDied(f"{member.name} did not load version {version}: {why}", actor=member.name)

    async def _bring(self, member: Member, version: int, sent: Sent) -> None:
        # As a new try: what changed since another version would be of no use to it.
        offer = await self._source.offer(sent, [member.name], again=True)
        async with anyio.create_task_group() as serving:
            if offer.meets:
                serving.start_soon(self._source.serve, offer)
            await member.update_weights(version, offer)
            await self._versions.changed.wait_until(lambda: member.name in self._versions.served)
            serving.cancel_scope.cancel()

    async def _publish(self, version: int, sent: Sent) -> None:
        started = self._clock()
        self._events.append(PublishStarted(version=version))
        loaded: dict[str, Any] = {}
        for attempt in range(1, self._config.publish_tries + 1):
            try:
                await self._send(version, sent, loaded, again=attempt > 1)
                break
            except (ExceptionGroup, Overdue) as error:
                cause = first_cause(error)
                self._events.append(PublishFailed(version=version, error=repr(cause)))
                log.warning("publish failed", version=version, attempt=attempt, error=repr(cause))
                last = attempt == self._config.publish_tries
                if last and isinstance(cause, Overdue) and await self._go_on_without(version, loaded):
                    break
                if last or isinstance(cause, ActorDied):
                    raise cause from error
        took = [update for update in loaded.values() if update is not None]
        self._events.append(
            Published(
                version=version,
                seconds=round(self._clock() - started, 6),
                gather_s=round(sent.gather_s, 6),
                transfer_s=round(max((update.transfer_s for update in took), default=0.0), 6),
                stage_s=round(max((update.stage_s for update in took), default=0.0), 6),
                pause_s=round(max((update.pause_s for update in took), default=0.0), 6),
                bytes=max((update.staged_bytes for update in took), default=0),
                sent_bytes=sent.bytes,
            )
        )

    async def _go_on_without(self, version: int, loaded: Mapping[str, Any]) -> bool:
        """Give up those that did not load a version, if others can come in their place; return whether they can."""
        versions, limit_s = self._versions, self._config.publish_timeout_s
        if not self._collectors.are_replaced:
            return False
        why = f"did not load version {version} in {self._config.publish_tries} tries of {limit_s:g} s"
        for name in self._late(version, loaded):
            self._collectors[name].report(ActorDied(f"{name} {why} (trainer.publish_timeout_s)", actor=name))
        return await versions.changed.wait_at_most(
            lambda: not versions.served or versions.published >= version, limit_s
        )

    def _late(self, version: int, loaded: Mapping[str, Any]) -> list[str]:
        served = self._versions.served
        return [name for name in served if name not in loaded or served[name] < version]

    async def _send(self, version: int, sent: Sent, loaded: dict[str, Any], *, again: bool) -> None:
        """Send the weights to those that are not among `loaded`, and wait for every acknowledgement.

        Who has loaded them is added, with what it took. Overdue, naming who is late, after `publish_timeout_s`. A load
        that is given up goes on in its collector, and the next try joins it.
        """
        versions, limit_s = self._versions, self._config.publish_timeout_s

        async def send(collector: Member, offer: Offer) -> None:
            took = await collector.update_weights(version, offer)
            if collector.is_reachable:
                loaded[collector.name] = took

        with anyio.move_on_after(limit_s) as limit:
            receivers = [one for one in self._collectors if one.name not in loaded and one.is_reachable]
            async with anyio.create_task_group() as serving:
                if receivers:
                    offer = await self._source.offer(sent, [collector.name for collector in receivers], again=again)
                    if offer.meets:
                        serving.start_soon(self._source.serve, offer)
                    async with anyio.create_task_group() as tasks:
                        for collector in receivers:
                            tasks.start_soon(send, collector, offer)
                # Whoever joined the load of an earlier try never comes to be served: it is not waited for.
                serving.cancel_scope.cancel()
            # Without any generator left it is published to those that come.
            await versions.changed.wait_at_most(lambda: not versions.served or versions.published >= version, limit_s)
        late = self._late(version, loaded)
        if limit.cancelled_caught or late:
            raise Overdue(
                f"version {version} was not published within {limit_s:g} s (trainer.publish_timeout_s): "
                f"{', '.join(late)} did not acknowledge it"
            )
