"""Trainer version, what each generator serves, and what is published.

Invariant: no version goes backwards, and no generator serves a version that the trainer has
not reached; so a stamp never exceeds the trainer's version.
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
        self.changed = Signal()

    @property
    def trainer(self) -> int:
        """V: the number of training batches that the weights have had."""
        return self._trainer

    @property
    def published(self) -> int:
        """The newest version that every live generator has acknowledged."""
        return self._oldest if self.served else self.trainer

    @property
    def publish_lag(self) -> int:
        """V minus the version of the generator that is furthest behind."""
        return self.trainer - self.published

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
        self._serving, self._oldest = Counter(self.served.values()), 0
        self.changed.notify()

    def acknowledge(self, generator: str, version: int) -> None:
        """Note that a generator has loaded `version` whole."""
        if version < self.served[generator]:
            raise VersionError(
                f"{generator} serves version {self.served[generator]} and acknowledged {version}; "
                "versions never go backwards"
            )
        if version > self.trainer:
            raise VersionError(f"{generator} acknowledged version {version}, but the trainer is at {self.trainer}")
        self._serving[self.served[generator]] -= 1
        self._serving[version] += 1
        self.served[generator] = version
        while not self._serving[self._oldest]:
            del self._serving[self._oldest]
            self._oldest += 1
        self.changed.notify()
