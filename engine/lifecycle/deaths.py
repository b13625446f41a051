"""Who died in a run, and of what: each actor's death stands in the event log, once."""

from collections.abc import Iterator
from contextlib import contextmanager

from asyncrl.engine.errors import ActorDied
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.types import OwnerDead
from asyncrl.engine.records.ending import first_cause


class Deaths:
    """Logs deaths. Collectors and ranks hold no claims, so nothing becomes ready again by theirs."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._dead: set[str] = set()

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Take whatever is raised inside, by an actor's own loop or its long poll, for its death."""
        try:
            yield
        except Exception as error:  # The actor's supervision edge.
            self._declare(name, error)
            raise

    def among(self, error: BaseException) -> None:
        """Log the deaths that ended a run: where a call fails first, the long poll may never come to tell."""
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
