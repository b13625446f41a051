"""Who died, when something fails: the first error that is heard may be what a death did to the living.

For example, a rank that is killed in the middle of a sum over ranks makes the other ranks raise, and they may be heard
first.
"""

from collections.abc import Sequence

import anyio

from asyncrl.engine.data_plane.base import DataPlane
from asyncrl.engine.deployment import Actor
from asyncrl.engine.errors import AsyncRLError, DataPlaneDown, DataPlaneError, Overdue
from asyncrl.engine.lifecycle.deaths import is_death
from asyncrl.engine.records.ending import first_cause

# A data plane is asked once a second.
_LOOK_S = 3.0


async def first_death(error: Exception, actors: Sequence[Actor], plane: DataPlane) -> Exception:
    """Return the death that `error` may follow from; if there is none, the first cause of `error`."""
    cause = _unwrapped(error)
    if is_death(cause) or (isinstance(cause, AsyncRLError) and not isinstance(cause, DataPlaneError | Overdue)):
        return _first(error)
    found: list[Exception] = []

    async def ask(actor: Actor) -> None:
        try:
            await actor.events(0, 0.0)
        except Exception as answer:  # The actor's supervision edge: one that raises something else lives.
            if is_death(answer):
                found.append(answer)
                looking.cancel_scope.cancel()

    async def watch() -> None:
        try:
            await plane.watch()
        except DataPlaneDown as down:
            found.append(down)
            looking.cancel_scope.cancel()

    with anyio.move_on_after(_LOOK_S, shield=True):
        async with anyio.create_task_group() as looking:
            looking.start_soon(watch)
            for actor in actors:
                looking.start_soon(ask, actor)
    if not found:
        return _first(error)
    found[0].__cause__ = _first(error)
    return found[0]


def _first(error: Exception) -> Exception:
    first = first_cause(error)
    return first if isinstance(first, Exception) else error


def _unwrapped(error: BaseException) -> BaseException:
    """Return what an actor raised, where Ray wraps it."""
    first = first_cause(error)
    cause = getattr(first, "cause", None)
    return _unwrapped(cause) if isinstance(cause, Exception) else first
