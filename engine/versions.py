"""Trainer version, what each generator serves, and what is published.

Invariant: no version goes backwards, and no generator serves a version that the trainer has
not reached; so a stamp never exceeds the trainer's version.
"""

from collections.abc import Iterable

from asyncrl.engine.errors import VersionError
from asyncrl.engine.signal import Signal


class Versions:
    """V (`trainer`), the served version by generator, and P (`published`)."""

    def __init__(self, generators: Iterable[str]) -> None:
        self.trainer = 0
        self.in_step = False
        self.served = dict.fromkeys(generators, 0)
        self.changed = Signal()

    @property
    def published(self) -> int:
        """The newest version that every live generator has acknowledged."""
        return min(self.served.values(), default=self.trainer)

    @property
    def publish_lag(self) -> int:
        """V minus the version of the generator that is furthest behind."""
        return self.trainer - self.published

    @property
    def next_batch(self) -> int:
        """The version at which a batch assembled now will be trained: V + 1 while a step runs."""
        return self.trainer + self.in_step

    def begin_step(self) -> None:
        self.in_step = True

    def advance(self) -> int:
        """End a step: V grows by one."""
        self.trainer += 1
        self.in_step = False
        self.changed.notify()
        return self.trainer

    def acknowledge(self, generator: str, version: int) -> None:
        """Note that a generator has loaded `version` whole."""
        if version < self.served[generator]:
            raise VersionError(
                f"{generator} serves version {self.served[generator]} and acknowledged {version}; "
                "versions never go backwards"
            )
        if version > self.trainer:
            raise VersionError(f"{generator} acknowledged version {version}, but the trainer is at {self.trainer}")
        self.served[generator] = version
        self.changed.notify()
