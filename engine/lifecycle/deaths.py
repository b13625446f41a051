"""Which actors of a run died, and why: the event log has each death once."""

from collections.abc import Iterator
from contextlib import contextmanager

from asyncrl.engine.errors import ActorDied
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.types import OwnerDead
from asyncrl.engine.records.ending import first_cause


class Deaths:
    """Logs deaths. Collectors and ranks do not claim, so their death makes no group ready again."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._dead: set[str] = set()

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

    def _declare(self, name: str, error: Exception) -> None:
        if name not in self._dead:
            self._dead.add(name)
            cause = first_cause(error)
            self._log.append(OwnerDead(owner=name, groups=[], error=f"{type(cause).__name__}: {cause}"))
