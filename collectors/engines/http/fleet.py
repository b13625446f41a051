"""Replicas as one: held, updated and released together; left out when they die, taken back when they are well.

Invariant: a replica that is up serves the fleet's version. What fails on one is undone on all.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import anyio.lowlevel

from asyncrl.collectors.engines.http.client import Refused, ServerDown
from asyncrl.collectors.engines.http.routing import Replica, Router
from asyncrl.collectors.engines.swap import swap
from asyncrl.engine.errors import GenerationError, VersionError

Act = Callable[[Replica], Awaitable[None]]


class Fleet:
    """`changed` is called whenever a replica has come or gone."""

    def __init__(self, router: Router, changed: Callable[[], None], answer_s: float) -> None:
        self._router = router
        self._changed = changed
        self._answer_s = answer_s

    def leave_out(self, replica: Replica) -> None:
        """Route nothing to a replica until `probe` has taken it back."""
        if replica.up:
            replica.up = False
            self._changed()

    async def probe(self, version: int, file: Path | None, *, held: bool) -> None:
        """Ask all replicas how they are; one that is well again gets the version that serves, then requests."""
        async with anyio.create_task_group() as tasks:
            for replica in self._router.replicas:
                tasks.start_soon(self._probe, replica, version, file, held)

    async def hold(self, *, empty_cache: bool = False) -> None:
        """Hold all that are up; Refused if one says no, and then none is held."""
        try:
            await self._each(lambda replica: replica.server.hold(empty_cache=empty_cache))
        except Refused:
            await self.go_on()
            raise

    async def go_on(self) -> None:
        await self._each(lambda replica: replica.server.go_on())

    async def swap(self, version: int, file: Path, before: Path | None, old: int) -> None:
        """Load a version into all that are up. VersionError if one could not, and then all have the one before."""
        taken: list[Replica] = []
        refused: list[VersionError] = []

        async def load(replica: Replica) -> None:
            try:
                await swap(replica.server, version, file, before)
                taken.append(replica)
            except VersionError as error:
                refused.append(error)
            except GenerationError:
                # Neither the new weights nor the old: another probe may mend it.
                replica.up = False

        await self._each(load)
        if refused:
            await self._each(
                lambda replica: _return(replica, before, old) if replica in taken else anyio.lowlevel.checkpoint()
            )
            raise refused[0]
        self._changed()
        if not taken:
            raise VersionError(f"version {version} reached none of {len(self._router.replicas)} replicas")

    async def _probe(self, replica: Replica, version: int, file: Path | None, held: bool) -> None:
        try:
            await replica.server.probe(self._answer_s)
            if not replica.up:
                await self._take_back(replica, version, file, held)
        except GenerationError:
            self.leave_out(replica)

    async def _take_back(self, replica: Replica, version: int, file: Path | None, held: bool) -> None:
        server = replica.server
        found = await server.version()
        await server.hold(empty_cache=False)
        if found is None and file is None:
            # Just started, it has the checkpoint's weights, as all others have.
            await server.label(version)
        elif found != version:
            await server.load(file)
            differing = await server.differences(file)
            if differing:
                raise GenerationError(f"{replica.url} did not take version {version}: {differing[:3]} differ")
            await server.label(version)
        if not held:
            await server.go_on()
        replica.up = True
        self._changed()

    async def _each(self, act: Act) -> None:
        """Do it on all that are up, at once; leave out who is down. The first Refused is raised once all are done."""
        refused: list[Refused] = []

        async def one(replica: Replica) -> None:
            try:
                await act(replica)
            except ServerDown:
                self.leave_out(replica)
            except Refused as error:
                refused.append(error)

        async with anyio.create_task_group() as tasks:
            for replica in self._router.up:
                tasks.start_soon(one, replica)
        if refused:
            raise refused[0]


async def _return(replica: Replica, before: Path | None, version: int) -> None:
    await replica.server.load(before)
    await replica.server.label(version)
