"""What a run asks of the process around it."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import anyio

from asyncrl.configs import RunConfig
from asyncrl.engine.events.ledger import Ledger
from asyncrl.engine.events.progress import Progress

if TYPE_CHECKING:
    from asyncrl.engine.loop.controller import Controller


class Host:
    """Plain Python around a run: it shows nothing. The command line has a subclass that shows, and kills.

    Times of a run count from `began_wall`, in seconds since the epoch.
    """

    def __init__(self) -> None:
        self.began_wall = time.time()

    def tell(self, line: str) -> None:
        """Hear what takes long before the run begins, and of what to beware."""

    def begin(self, config: RunConfig, directory: Path, *, ledger: Ledger, progress: Progress) -> None:
        """Hear that everything is checked and the folder is there; the folds fill as the run goes."""

    def watch(self, controller: "Controller") -> None:
        """Hear that everything has started."""

    async def show(self) -> None:
        """Show the run until cancelled; an error here ends the run in order, as its failure."""
        await anyio.sleep_forever()

    def complain(self, line: str) -> None:
        """Show an error that was logged."""

    def kill(self, code: int) -> NoReturn:
        """End at once, by a second signal; what is in flight gets no fate."""
        raise KeyboardInterrupt
