"""The collectors of a run that live, by name, whoever came in the place of whom.

Invariant: who grants to a collector that dies, cancels there or publishes to it goes on; the collector's supervisor
hears of the death, and makes good what was lost.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import anyio

from asyncrl.collectors.engines.base import Cache
from asyncrl.engine.deployment import CollectorHandle
from asyncrl.engine.errors import ActorDied
from asyncrl.engine.records import Grant
from asyncrl.engine.weights.base import Offer


class Member:
    """One collector's process. It is granted groups, and published to, once it has `joined`."""

    def __init__(self, handle: CollectorHandle, *, joined: bool) -> None:
        self.handle = handle
        self.joined = joined
        self._error: ActorDied | None = None
        self._died = anyio.Event()
        self._dismissed = anyio.Event()
        self._lives = True
        self._calls: set[anyio.CancelScope] = set()

    @property
    def name(self) -> str:
        return self.handle.name

    @property
    def is_reachable(self) -> bool:
        """Whether neither a call nor its supervisor has found it dead."""
        return self._lives and self._error is None

    async def grant(self, grants: Sequence[Grant]) -> None:
        """Grant groups to this process, and to no other: whoever comes in its place has none of them."""
        await self._call(self.handle.grant, grants)

    async def cancel(self, groups: Sequence[int]) -> None:
        await self._call(self.handle.cancel, groups)

    async def update_weights(self, version: int, offer: Offer) -> Any:
        return await self._call(self.handle.update_weights, version, offer)

    async def sleep(self, cache: Cache) -> None:
        await self._call(self.handle.sleep, cache)

    async def wake(self) -> None:
        await self._call(self.handle.wake)

    def report(self, error: ActorDied) -> None:
        """Note that a call found it dead."""
        self._error = self._error or error
        self._died.set()

    def dismiss(self) -> None:
        """Note that nothing is expected of it any more: it may leave."""
        self._dismissed.set()

    async def dismissal(self) -> None:
        """Wait until it may leave."""
        await self._dismissed.wait()

    def let_go(self) -> None:
        """End the calls under way: a process that hangs would keep their callers."""
        self._lives = False
        for call in self._calls:
            call.cancel()

    async def death(self) -> NoReturn:
        """Raise the ActorDied that a call met."""
        await self._died.wait()
        assert self._error is not None
        raise self._error

    async def _call(self, method: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        with anyio.CancelScope() as call:
            self._calls.add(call)
            try:
                return await method(*arguments)
            except ActorDied as error:
                self.report(error)
            finally:
                self._calls.discard(call)
        return None


class Collectors:
    """The members, in the order of their first coming. Iteration is over those that have joined."""

    def __init__(self, handles: Iterable[CollectorHandle]) -> None:
        self._members = {handle.name: Member(handle, joined=True) for handle in handles}
        self.are_replaced = False
        """Whether another comes in the place of one that is reported dead."""

    def __iter__(self) -> Iterator[Member]:
        return iter([member for member in self._members.values() if member.joined])

    def __getitem__(self, name: str) -> Member:
        return self._members[name]

    def all(self) -> list[Member]:
        """Return also those that have not joined yet."""
        return list(self._members.values())

    def add(self, handle: CollectorHandle) -> Member:
        """Take up who comes in a dead one's place; it has yet to join."""
        member = self._members[handle.name] = Member(handle, joined=False)
        return member

    def get(self, name: str) -> Member | None:
        return self._members.get(name)

    def remove(self, name: str) -> None:
        member = self._members.pop(name, None)
        if member is not None:
            member.let_go()

    async def cancel(self, name: str, groups: Sequence[int]) -> None:
        """Cancel groups of a collector; those of one that died are lost anyway."""
        if name in self._members:
            await self._members[name].cancel(groups)
