"""Only what changed since the version before, through any other transport.

Invariant: the sender keeps a version until it is forgotten, a receiver the last one that it got; what changed is sent
with the number of the version that it belongs to. A second try sends the whole, so nobody needs a base for it.
"""

from collections.abc import Sequence
from typing import Any

import torch

from asyncrl.engine.aio.blocking import Blocking
from asyncrl.engine.errors import VersionError
from asyncrl.engine.weights.base import Offer, Sent, State, WeightTransport
from asyncrl.engine.weights.changes import apply_changes, find_changes
from asyncrl.engine.weights.snapshots import Snapshot, Snapshots

_WHOLE = "whole"


class Delta(WeightTransport):
    """The content is (number, base, layout, what `inner` sent or offers); base is None if the whole was sent."""

    def __init__(self, inner: WeightTransport, *, blocking: Blocking[Any]) -> None:
        self._inner = inner
        self._blocking = blocking
        self._snapshots = Snapshots()
        self._last: Snapshot | None = None
        self._sent: dict[int, list[Sent]] = {}
        self._held: tuple[int, torch.Tensor] | None = None

    def send(self, state: State) -> Sent:
        before, taken = self._last, self._snapshots.take(state)
        self._last = taken
        changes = None
        if before is not None and before.layout == taken.layout:
            changes = find_changes(before.flat, taken.flat)
        base = before.number if before is not None and changes is not None else None
        inner = self._inner.send({_WHOLE: taken.flat} if changes is None else changes)
        self._sent[taken.number] = [inner]
        return Sent((taken.number, base, taken.layout, inner), taken.number, inner.bytes)

    def offer(self, sent: Sent, receivers: Sequence[str], *, again: bool = False) -> Offer:
        number, base, layout, inner = sent.content
        if again:
            base, inner = None, self._inner.send({_WHOLE: self._snapshots.get(number).flat})
            self._sent[number].append(inner)
        offer = self._inner.offer(inner, receivers, again=again)
        return Offer((number, base, layout, offer), number, offer.meets)

    def serve(self, offer: Offer) -> None:
        self._inner.serve(offer.content[-1])

    def forget(self, sent: Sent) -> None:
        for inner in self._sent.pop(sent.number, ()):
            self._inner.forget(inner)
        self._snapshots.forget(sent.number)

    async def receive(self, offer: Offer) -> dict[str, torch.Tensor]:
        number, base, layout, inner = offer.content
        received = await self._inner.receive(inner)
        if base is None:
            flat = received[_WHOLE]
        elif self._held is None or self._held[0] != base:
            held = "none" if self._held is None else self._held[0]
            raise VersionError(f"changes of weights number {base} came, and {held} is here; the next try sends all")
        else:
            held_flat = self._held[1]
            flat = await self._blocking(lambda: apply_changes(held_flat, received))
        self._held = (number, flat)
        views: dict[str, torch.Tensor] = layout.views(flat)
        return views
