"""Handles on the actors of a run on Ray: calls have a deadline, and a death is an ActorDied."""

from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import ray
from ray.exceptions import RayActorError, RayTaskError

from asyncrl.collectors.engines.base import Cache
from asyncrl.configs import RunConfig
from asyncrl.engine.aio.outbox import Numbered
from asyncrl.engine.errors import ActorDied, AsyncRLError
from asyncrl.engine.lifecycle.ray_process import RayProcess
from asyncrl.engine.model.folder import Note
from asyncrl.engine.records import Grant
from asyncrl.engine.records.work import ForwardWork, RankResult, TrainWork
from asyncrl.engine.weights.base import Offer, Sent, WeightTransport

# The limit of a call whose caller has a limit of its own, with an error that says more.
_CALLERS_S = float("inf")


class RemoteActor:
    """A handle on an actor: calls have a deadline, and its death is an ActorDied."""

    def __init__(self, name: str, actor: Any, answer_timeout_s: float) -> None:
        self.name = name
        self.actor = actor
        self._answer_timeout_s = answer_timeout_s
        self._process: RayProcess | None = None

    async def _call(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        return await self._await(self.actor.call.remote(method, args, kwargs), method, timeout_s)

    async def connect(self, *args: Any, timeout_s: float) -> None:
        # First, so that one that hangs while it connects can be ended.
        self._process = await self._await(self.actor.process.remote(), "process", timeout_s)
        await self._await(self.actor.connect.remote(*args), "connect", timeout_s)

    def kill(self) -> None:
        """End the actor without waiting. Ray alone asks it to end, which one that is stopped does not hear."""
        ray.kill(self.actor, no_restart=True)
        if self._process is not None:
            self._process.kill()

    async def end(self) -> None:
        """End the actor with every process that it started, and return when they are gone."""
        self.kill()
        if self._process is not None:
            await self._process.end()

    async def _await(self, reference: Any, method: str, timeout_s: float | None) -> Any:
        limit = self._answer_timeout_s if timeout_s is None else timeout_s
        try:
            with anyio.fail_after(limit):
                return await reference
        except RayTaskError:
            raise  # The actor's own error, with its traceback.
        except RayActorError as error:
            raise ActorDied(f"{self.name} died during {method}: {error}", actor=self.name) from error
        except TimeoutError:
            raise ActorDied(f"{self.name} did not answer {method} within {limit:g} s", actor=self.name) from None

    async def events(self, after_seq: int, wait_s: float) -> list[Numbered]:
        messages: list[Numbered] = await self._call("events", after_seq, wait_s, timeout_s=_CALLERS_S)
        return messages


class RemoteCollector(RemoteActor):
    def __init__(self, name: str, actor: Any, config: RunConfig) -> None:
        super().__init__(name, actor, config.supervision.answer_timeout_s)

    async def run(self) -> None:
        # No deadline: it ends with the run. The long poll beside it watches the actor.
        await self._call("run", timeout_s=_CALLERS_S)

    async def stop(self) -> None:
        await self._call("stop")

    async def grant(self, grants: Sequence[Grant]) -> None:
        await self._call("grant", grants)

    async def cancel(self, groups: Sequence[int]) -> None:
        await self._call("cancel", groups)

    async def update_weights(self, version: int, offer: Offer) -> Any:
        return await self._call("update_weights", version, offer, timeout_s=_CALLERS_S)

    async def sleep(self, cache: Cache) -> None:
        await self._call("sleep", cache, timeout_s=_CALLERS_S)

    async def wake(self) -> None:
        await self._call("wake", timeout_s=_CALLERS_S)


class RemoteRank(RemoteActor):
    def __init__(self, name: str, actor: Any, config: RunConfig) -> None:
        super().__init__(name, actor, config.supervision.answer_timeout_s)
        self._step_timeout_s = config.trainer.step_timeout_s

    async def train(self, work: TrainWork) -> RankResult:
        result: RankResult = await self._call("train", work, timeout_s=self._step_timeout_s)
        return result

    async def logprobs(self, work: ForwardWork) -> dict[str, tuple[float, float]]:
        gaps: dict[str, tuple[float, float]] = await self._call("logprobs", work, timeout_s=self._step_timeout_s)
        return gaps

    async def warm_up(
        self, examples: Sequence[tuple[list[int], int]], *, steps: int, batch: int, learning_rate: float
    ) -> float:
        loss: float = await self._call(
            "warm_up",
            examples,
            steps=steps,
            batch=batch,
            learning_rate=learning_rate,
            timeout_s=self._step_timeout_s * steps,
        )
        return loss

    async def weights(self) -> Sent:
        sent: Sent = await self._call("weights")
        return sent

    async def offer(self, sent: Sent, receivers: Sequence[str], *, again: bool = False) -> Offer:
        offer: Offer = await self._call("offer", sent, receivers, again=again, timeout_s=_CALLERS_S)
        return offer

    async def serve(self, offer: Offer) -> None:
        await self._call("serve", offer, timeout_s=_CALLERS_S)

    async def lend_weights(self) -> None:
        await self._call("lend_weights", timeout_s=_CALLERS_S)

    async def copy_weights(self, transport: WeightTransport) -> Sent:
        sent: Sent = await self._call("copy_weights", transport, timeout_s=_CALLERS_S)
        return sent

    async def digest(self) -> Mapping[str, int]:
        digest: Mapping[str, int] = await self._call("digest")
        return digest

    async def sleep(self) -> None:
        await self._call("sleep", timeout_s=_CALLERS_S)

    async def wake(self) -> None:
        await self._call("wake", timeout_s=_CALLERS_S)

    async def hold_weights(self) -> int:
        version: int = await self._call("hold_weights", timeout_s=_CALLERS_S)
        return version

    async def save_held(self, folders: Sequence[str], note: Note) -> None:
        await self._use_disk("save_held", folders, note)

    async def hold_state(self) -> int:
        version: int = await self._call("hold_state", timeout_s=_CALLERS_S)
        return version

    async def save_state(self, folder: str) -> None:
        await self._use_disk("save_state", folder)

    async def load_state(self, folder: str) -> None:
        await self._use_disk("load_state", folder)

    async def _use_disk(self, method: str, *args: Any) -> None:
        try:
            await self._call(method, *args, timeout_s=_CALLERS_S)
        except RayTaskError as error:
            # Its message is a traceback; a full disk or a damaged file is told in one line.
            raise error.cause if isinstance(error.cause, AsyncRLError) else error from None
