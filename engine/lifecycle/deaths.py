"""Which actors of a run died, and why: the event log has each death once, and says whether the run goes on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from asyncrl.engine.errors import ActorDied, EngineDied
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.types import OwnerDead
from asyncrl.engine.records.ending import first_cause


class Deaths:
    """Logs deaths. Collectors and ranks do not claim, so their death makes no group ready again.

    `survives` is told of each, with the actor's name, and says whether the actor will be replaced.
    """

    def __init__(self, log: EventLog, survives: Callable[[str, Exception], bool] = lambda name, error: False) -> None:
        self._log = log
        self._survives = survives
        self._dead: dict[str, bool] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Log any error raised inside, by an actor's own loop or its long poll, as its death."""
        try:
            yield
        except Exception as error:  # The actor's supervision edge.
            self._declare(name, error)
            raise

    def among(self, error: BaseException) -> None:
        """Log the deaths that ended a run. If a call fails first, the long poll is cancelled before it can tell."""
        if isinstance(error, BaseExceptionGroup):
            for one in error.exceptions:
                self.among(one)
        elif isinstance(error, ActorDied) and error.actor:
            self._declare(error.actor, error)

    @property
    def names(self) -> list[str]:
        """The actors that are dead now."""
        return list(self._dead)

    def survived(self, name: str) -> bool:
        """Whether an actor died, and is to be replaced."""
        return self._dead.get(name, False)

    def forget(self, name: str) -> None:
        """From now on the name is that of a successor, which may die as well."""
        self._dead.pop(name, None)

    def _declare(self, name: str, error: Exception) -> None:
        if name not in self._dead:
            cause = first_cause(error)
            self._dead[name] = replaced = self._survives(name, error)
            self._log.append(
                OwnerDead(owner=name, groups=[], error=f"{type(cause).__name__}: {cause}", replaced=replaced)
            )


def is_death(error: BaseException) -> bool:
    """Whether all that went wrong is that a process ended or fell silent: an actor's, or that of its engine."""
    if isinstance(error, BaseExceptionGroup):
        return all(is_death(one) for one in error.exceptions)
    # Ray wraps what an actor raised.
    cause = getattr(error, "cause", None)
    return is_death(cause) if isinstance(cause, Exception) else isinstance(error, ActorDied | EngineDied)
