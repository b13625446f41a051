"""The actor's side of the long poll: messages in order, kept until the controller has them.

Invariant: a reader that asks `after` the last number it saw misses nothing and sees nothing
twice. `fail` ends the conversation with the actor's own error.
"""

from collections import deque
from dataclasses import dataclass

from asyncrl.engine.aio.signal import Signal
from asyncrl.engine.records.message import Message

Numbered = tuple[int, Message]


@dataclass(frozen=True, slots=True)
class OutboxStatistics:
    """Messages that no reader has confirmed, and polls that wait for one."""

    unread: int
    tasks_waiting: int


class Outbox:
    """Numbers messages from 1."""

    def __init__(self) -> None:
        self._messages: deque[Numbered] = deque()
        self._last = 0
        self._error: BaseException | None = None
        self._changed = Signal()

    def post(self, message: Message) -> None:
        self._last += 1
        self._messages.append((self._last, message))
        self._changed.notify()

    def fail(self, error: BaseException) -> None:
        """Make every later poll raise `error`, once the messages before it are read."""
        self._error = error
        self._changed.notify()

    async def after(self, seq: int, wait_s: float) -> list[Numbered]:
        """Return messages numbered above `seq`, waiting up to `wait_s`; empty when there are none."""
        while self._messages and self._messages[0][0] <= seq:
            self._messages.popleft()
        await self._changed.wait_at_most(lambda: bool(self._messages) or self._error is not None, wait_s)
        if not self._messages and self._error is not None:
            raise self._error
        return list(self._messages)

    def statistics(self) -> OutboxStatistics:
        """Return how much waits here now."""
        return OutboxStatistics(len(self._messages), self._changed.statistics().tasks_waiting)
