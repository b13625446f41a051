"""The publisher: new weights to every generator.

Invariant: a failed publish leaves what is served as it was; it is repeated, or ends the run.
"""

from collections.abc import Callable, Sequence
from typing import Any

import anyio
import structlog

from asyncrl.configs.sections.trainer import Trainer
from asyncrl.engine.deployment import CollectorHandle, WeightSource
from asyncrl.engine.errors import ActorDied, Overdue
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.types import Published, PublishFailed, PublishStarted
from asyncrl.engine.loop.versions import Versions
from asyncrl.engine.records.ending import first_cause
from asyncrl.engine.weights.base import Offer, Sent

log = structlog.get_logger()


class Publisher:
    """Brings generators to the trainer's versions, one version after the other."""

    def __init__(
        self,
        config: Trainer,
        collectors: Sequence[CollectorHandle],
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

    async def publish(self, version: int, sent: Sent) -> None:
        """Bring every generator to `version`; a failed try leaves P as it was and is repeated."""
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
                if attempt == self._config.publish_tries or isinstance(cause, ActorDied):
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

    async def _send(self, version: int, sent: Sent, loaded: dict[str, Any], *, again: bool) -> None:
        """Send the weights to those that are not among `loaded`, and wait for every acknowledgement.

        Who has loaded them is added, with what it took. Overdue, naming who is late, after `publish_timeout_s`. A load
        that is given up goes on in its collector, and the next try joins it.
        """
        versions, limit_s = self._versions, self._config.publish_timeout_s

        async def send(collector: CollectorHandle, offer: Offer) -> None:
            loaded[collector.name] = await collector.update_weights(version, offer)

        with anyio.move_on_after(limit_s) as limit:
            receivers = [collector for collector in self._collectors if collector.name not in loaded]
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
            await versions.changed.wait_at_most(lambda: versions.published >= version, limit_s)
        late = [name for name, served in versions.served.items() if name not in loaded or served < version]
        if limit.cancelled_caught or late:
            raise Overdue(
                f"version {version} was not published within {limit_s:g} s (trainer.publish_timeout_s): "
                f"{', '.join(late)} did not acknowledge it"
            )
