"""A generator whose completions are whole conversations with an environment, with their rewards.

Each turn is a request of its own to the engine. Samples go on by themselves; with `exact` those of groups that were
granted together go in step.
"""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import anyio
import numpy as np

from asyncrl.collectors.engines.base import Cache, Result
from asyncrl.collectors.environments.conversation import Respond
from asyncrl.collectors.environments.lockstep import Batch, Lockstep, Place
from asyncrl.collectors.environments.transcript import with_common_prompt
from asyncrl.collectors.generators.base import Completion, GroupRequest
from asyncrl.collectors.generators.engine_generator import EngineGenerator
from asyncrl.engine.errors import GenerationError
from asyncrl.engine.records import Prompt
from asyncrl.engine.weights.base import State


class Play(Protocol):
    """A Conversation, or what plays agents."""

    async def play(
        self, prompt: Prompt, ids: tuple[int, ...], *, seed: int, world_seed: int, respond: Respond
    ) -> Completion:
        """Play one sample to its end."""


class EnvironmentGenerator:
    """Plays samples by `conversation`, whose turns come from `engine`. `beside` runs for as long as it does."""

    def __init__(
        self,
        engine: EngineGenerator,
        conversation: Play,
        *,
        beside: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self._engine = engine
        self._conversation = conversation
        self._beside = beside
        self._together: dict[int, Lockstep] = {}
        self._send, self._batches = anyio.create_memory_object_stream[Batch](float("inf"))

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._engine.run)
            if self._beside is not None:
                tasks.start_soon(self._beside)
            async for batch in self._batches:
                await self._decode(batch)

    async def generate(self, request: GroupRequest) -> Sequence[Completion]:
        lockstep = self._lockstep(request) if self._engine.exact else None
        group = lockstep.join() if lockstep else 0
        completions: dict[int, Completion] = {}
        going = set(range(len(request.seeds)))

        async def one(index: int) -> None:
            completions[index] = await self._play(request, index, lockstep, (group, index))
            going.remove(index)
            if lockstep is not None:
                lockstep.leave()

        try:
            async with anyio.create_task_group() as tasks:
                for index in range(len(request.seeds)):
                    tasks.start_soon(one, index)
        finally:
            if lockstep is not None:
                lockstep.leave(len(going))  # Of a group that failed or was given up: its peers must not wait for it.
                if lockstep.over:
                    self._together.pop(request.batch, None)
        return with_common_prompt([completions[index] for index in range(len(request.seeds))])

    async def update_weights(self, version: int, state: State) -> Any:
        return await self._engine.update_weights(version, state)

    async def sleep(self, cache: Cache) -> None:
        await self._engine.sleep(cache)

    async def wake(self) -> None:
        await self._engine.wake()

    async def stats(self) -> dict[str, Any]:
        return await self._engine.stats()

    async def _play(self, request: GroupRequest, index: int, lockstep: Lockstep | None, place: Place) -> Completion:
        begun = False

        def turned() -> None:
            nonlocal begun
            if not begun:
                begun = True
                request.turn(True)

        async def respond(ids: tuple[int, ...], seed: int, tokens: int) -> Result:
            asked = self._engine.request(ids, seed, max_new_tokens=tokens, temperature=request.temperature)
            if lockstep is None:
                result = await self._engine.respond(asked, turned)
            else:
                turned()
                result = await lockstep.turn(place, asked)
            if result.finish in ("error", "abort"):
                raise GenerationError(f"decoding a turn failed: {result.error or 'the engine aborted it'}")
            return result

        assert request.prompt is not None, "an environment needs the prompt's record"
        return await self._conversation.play(
            request.prompt,
            request.prompt_ids,
            seed=request.seeds[index],
            world_seed=_world_seed(request.seeds[0]),
            respond=respond,
        )

    def _lockstep(self, request: GroupRequest) -> Lockstep:
        if request.batch not in self._together:
            self._together[request.batch] = Lockstep(request.peers * len(request.seeds), self._send.send_nowait)
        return self._together[request.batch]

    async def _decode(self, batch: Batch) -> None:
        places = batch.places
        try:
            results = await self._engine.respond_together([batch.requests[place] for place in places])
            batch.results = dict(zip(places, results, strict=True))
        except GenerationError as error:
            batch.error = error
        finally:
            batch.done.set()


def _world_seed(first: int) -> int:
    """Return the environment's seed for a group whose first sample has the seed `first`."""
    return int(np.random.SeedSequence((first, 0, 1)).generate_state(1, np.uint64)[0])
