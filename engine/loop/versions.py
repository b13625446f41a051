"""Trainer version, what each generator serves, and what is published.

Invariant: no version goes backwards, and no generator serves a version that the trainer has
not reached; so a stamp never exceeds the trainer's version. A generator that joins serves what is published, or more.
"""

from collections import Counter
from collections.abc import Iterable

from asyncrl.engine.aio.signal import Signal
from asyncrl.engine.errors import VersionError


class Versions:
    """V (`trainer`), the served version by generator, and P (`published`).

    Example: after three steps V is 3. Of two generators, one has acknowledged 3, the other 2: P is 2 and the publish
    lag 1. While the trainer has a batch, which will make version 4, `next_batch` is 4: a group stamped 2 that is
    claimed now will be trained at age 2, since its batch is trained at V = 4.
    """

    def __init__(self, generators: Iterable[str]) -> None:
        self._trainer = 0
        self._batch_under_way = False
        self.served = dict.fromkeys(generators, 0)
        # Counts by version: searching a thousand generators at each step and acknowledgement would take long.
        self._serving = Counter(self.served.values())
        self._oldest = 0
        self._lost_all = False
        self.changed = Signal()

    @property
    def trainer(self) -> int:
        """V: the number of training batches that the weights have had."""
        return self._trainer

    @property
    def published(self) -> int:
        """The newest version that every live generator has acknowledged; of none, the last that was published."""
        return self._oldest if self.served or self._lost_all else self.trainer

    @property
    def publish_lag(self) -> int:
        """V minus the version of the generator that is furthest behind."""
        return self.trainer - self.published

    @property
    def behind(self) -> list[str]:
        """The generators that serve the oldest version that is served."""
        return [name for name, version in self.served.items() if version == self.published]

    @property
    def next_batch(self) -> int:
        """The version at which a batch assembled now will be trained: V + 1 while one is under way."""
        return self.trainer + self._batch_under_way

    def hand_over(self) -> None:
        """Note that the trainer has taken a batch, which will make the next version."""
        self._batch_under_way = True
        self.changed.notify()

    def give_up(self) -> None:
        """Note that the batch under way makes no version after all."""
        self._batch_under_way = False
        self.changed.notify()

    def advance(self) -> int:
        """End a step: V grows by one."""
        self._trainer += 1
        self._batch_under_way = False
        self.changed.notify()
        return self.trainer

    def jump_to(self, version: int) -> None:
        """Go to any trainer version: a what-if judges each claim at the version that it had."""
        self._trainer = version
        self.changed.notify()

    def restore(self, version: int) -> None:
        """Go on from a checkpoint: the trainer is at `version`, and every generator serves version 0 until it loads."""
        self._trainer = version
        self.serve_by(self.served)

    def serve_by(self, generators: Iterable[str]) -> None:
        """Begin anew with generators that all serve version 0."""
        self.served = dict.fromkeys(generators, 0)
        self._serving, self._oldest, self._lost_all = Counter(self.served.values()), 0, False
        self.changed.notify()

    def acknowledge(self, generator: str, version: int) -> None:
        """Note that a generator has loaded `version` whole; one that is not known joins by that."""
        before = self.served.get(generator, self.published)
        if version < before:
            raise VersionError(
                f"{generator} serves version {before} and acknowledged {version}; versions never go backwards"
                if generator in self.served
                else f"{generator} joins with version {version}, and {before} is published; versions never go backwards"
            )
        if version > self.trainer:
            raise VersionError(f"{generator} acknowledged version {version}, but the trainer is at {self.trainer}")
        if generator in self.served:
            self._serving[before] -= 1
        self._serving[version] += 1
        self.served[generator] = version
        self._find_oldest()

    def leave(self, generator: str) -> None:
        """Note that a generator is gone: what is published is what the others serve."""
        version = self.served.pop(generator, None)
        if version is not None:
            self._lost_all = not self.served
            self._serving[version] -= 1
            self._find_oldest()

    def published_to_nobody(self, version: int) -> None:
        """Note that a version was published; it changes something only while no generator is left."""
        if self._lost_all and not self.served:
            self._oldest = max(self._oldest, version)
            self.changed.notify()

    def _find_oldest(self) -> None:
        while self.served and not self._serving[self._oldest]:
            del self._serving[self._oldest]
            self._oldest += 1
        self.changed.notify()
