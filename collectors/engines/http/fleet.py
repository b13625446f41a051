"""Replicas as one: held, updated and released together; left out when they die, taken back when they are well.

Invariant: a replica that is up serves the fleet's version. What fails on one is undone on all.
"""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import anyio
import structlog

from asyncrl.collectors.engines.http.client import Refused, ServerDown
from asyncrl.collectors.engines.http.routing import Replica, Router
from asyncrl.collectors.engines.swap import swap
from asyncrl.engine.errors import GenerationError, VersionError

log = structlog.get_logger()

Act = Callable[[Replica], Awaitable[None]]


class Fleet:
    """`changed` is called whenever a replica has come or gone. A probe may take `answer_s`."""

    def __init__(self, router: Router, changed: Callable[[], None], answer_s: float) -> None:
        self._router = router
        self._changed = changed
        self._answer_s = answer_s

    def leave_out(self, replica: Replica, cause: Exception) -> None:
        """Route nothing to a replica until it has been taken back; what it was asked is asked elsewhere."""
        # Away, it fails all that is under way, and each probe: the first failure is the cause.
        if replica.up or not replica.cause:
            replica.leave_out(str(cause))
            log.warning("a server is left out", server=replica.url, why=replica.cause, left=len(self._router.up))
            self._changed()

    async def probe(self) -> list[Replica]:
        """Ask all replicas how they are, at once; return those that are well, and are not up."""
        well: list[Replica] = []

        async def ask(replica: Replica) -> None:
            try:
                await replica.server.probe(self._answer_s)
            except GenerationError as error:
                self.leave_out(replica, error)
            else:
                if not replica.up:
                    well.append(replica)

        async with anyio.create_task_group() as tasks:
            for replica in self._router.replicas:
                tasks.start_soon(ask, replica)
        return well

    async def adapt(self) -> None:
        """Ask replicas how full they are, at once, and send each as many requests as it takes."""

        async def ask(replica: Replica) -> None:
            try:
                pressure = await replica.server.pressure()
            except GenerationError:
                return  # Whether it is down is for a probe to tell, which has its own deadline.
            replica.tells = pressure is not None
            if pressure is None:
                return
            replica.cache_used = pressure.cache_used
            if replica.in_flight.observe(pressure, in_flight=replica.outstanding, now=anyio.current_time()):
                self._changed()

        async with anyio.create_task_group() as tasks:
            for replica in self._router.up:
                if replica.tells:
                    tasks.start_soon(ask, replica)

    async def take_back(self, well: Sequence[Replica], version: int, file: Path | None, *, held: bool) -> None:
        """Give replicas the version that serves, from its file or the checkpoint, and then requests."""

        async def take(replica: Replica) -> None:
            try:
                await self._take_back(replica, version, file, held)
            except GenerationError as error:
                # It is well, and yet of no use: that is told, once, since nothing changes it but its owner.
                if not isinstance(error, ServerDown) and str(error) != replica.cause:
                    replica.cause = str(error)
                    log.warning("a server cannot be taken back", server=replica.url, why=replica.cause)

        async with anyio.create_task_group() as tasks:
            for replica in well:
                tasks.start_soon(take, replica)

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
            replica.holds = None
            try:
                await swap(replica.server, version, file, before, old=old)
                replica.holds = version
                taken.append(replica)
            except VersionError as error:
                replica.holds = old
                refused.append(error)
            except GenerationError as error:
                # Neither the new weights nor the old: another probe may mend it.
                self.leave_out(replica, error)

        async def go_back(replica: Replica) -> None:
            replica.holds = None
            try:
                await replica.server.load(before)
                await replica.server.label(old)
            except GenerationError as error:
                self.leave_out(replica, error)
            else:
                replica.holds = old

        await self._each(load)
        if refused:
            async with anyio.create_task_group() as tasks:
                for replica in taken:
                    tasks.start_soon(go_back, replica)
            raise refused[0]
        if not taken:
            raise VersionError(f"version {version} reached none of the servers ({self._router.causes})")

    async def _take_back(self, replica: Replica, version: int, file: Path | None, held: bool) -> None:
        server, known = replica.server, replica.holds == version
        found = await server.version()
        await server.hold(empty_cache=False)
        replica.holds = None
        if found is None and file is None:
            # Just started, it has the checkpoint's weights, as all others have.
            await server.label(version)
        elif found != version or not known:
            # A number alone proves nothing: an earlier run may have left it, with weights of its own.
            await server.load(file)
            differing = await server.differences(file)
            if differing:
                raise GenerationError(f"{replica.url} did not take version {version}: {differing[:3]} differ")
            await server.label(version)
        if not held:
            await server.go_on()
        replica.holds, replica.up, replica.cause, replica.tells = version, True, "", True
        log.info("a server takes requests", server=replica.url, version=version, servers=len(self._router.up))
        self._changed()

    async def _each(self, act: Act) -> None:
        """Do it on all that are up, at once; leave out who is down. The first Refused is raised once all are done."""
        refused: list[Refused] = []

        async def one(replica: Replica) -> None:
            try:
                await act(replica)
            except ServerDown as error:
                self.leave_out(replica, error)
            except Refused as error:
                refused.append(error)

        async with anyio.create_task_group() as tasks:
            for replica in self._router.up:
                tasks.start_soon(one, replica)
        if refused:
            raise refused[0]
