"""Gathers calls into one: items that come during a call wait and go with the next call.

Invariant: every item is answered by exactly one call that ended; one whose caller was cancelled
is in no later call.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import anyio

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class _Entry(Generic[Item, Answer]):
    def __init__(self, item: Item) -> None:
        self.item = item
        self.answers: list[Answer] = []
        self.error: Exception | None = None


class Gathered(Generic[Item, Answer]):
    """`call` takes a list of items and returns one answer each; an error of it is everyone's.

    It must bear repeating: if the caller under whom it runs is cancelled, the others call again.
    """

    def __init__(self, call: Callable[[Sequence[Item]], Awaitable[Sequence[Answer]]]) -> None:
        self._call = call
        self._waiting: list[_Entry[Item, Answer]] = []
        self._turn = anyio.Lock()

    async def __call__(self, item: Item) -> Answer:
        entry: _Entry[Item, Answer] = _Entry(item)
        self._waiting.append(entry)
        try:
            async with self._turn:
                if entry in self._waiting:
                    await self._lead()
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)
        if entry.error is not None:
            raise entry.error
        return entry.answers[0]

    async def settled(self) -> None:
        """Wait until the current call has ended."""
        async with self._turn:
            pass

    async def _lead(self) -> None:
        """Call for all who wait; whoever leads is one of them."""
        entries, self._waiting = self._waiting, []
        try:
            answers = await self._call([entry.item for entry in entries])
        except Exception as error:  # Everyone's: each caller raises it.
            for entry in entries:
                entry.error = error
        except BaseException:
            self._waiting = entries + self._waiting
            raise
        else:
            for entry, answer in zip(entries, answers, strict=True):
                entry.answers.append(answer)
