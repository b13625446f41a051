"""Weights broadcast from the sender to all receivers at once: by NCCL between GPUs, by gloo between CPUs.

Invariant: sender and receivers of a try are the members of one group. It is used again while every try succeeds; after
a try that failed, and with other receivers, they meet in a new one, so that nothing of the old is waited for.
"""

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from asyncrl.engine.aio.blocking import Blocking
from asyncrl.engine.errors import Overdue
from asyncrl.engine.weights.base import Offer, Sent, State, WeightTransport
from asyncrl.engine.weights.process_group import Backend, ProcessGroup
from asyncrl.engine.weights.snapshots import Snapshots


class Broadcast(WeightTransport):
    """The content is (layout, session, receivers). `name` is this process's, by which receivers are offered to.

    All meet at the address `meeting`, of a TCPStore that outlives them. To meet and to broadcast take `timeout_s` each
    at most: half of a try, so that it ends with an error of its own, and the next one finds nobody still in it.
    """

    def __init__(
        self,
        name: str,
        meeting: str,
        *,
        backend: Backend,
        device: torch.device,
        timeout_s: float,
        blocking: "Blocking[dict[str, torch.Tensor]]",
    ) -> None:
        self._name = name
        self._meeting = meeting
        self._backend: Backend = backend
        self._device = device
        self._timeout_s = timeout_s
        self._blocking = blocking
        self._snapshots = Snapshots(device)
        self._session = 0
        self._receivers: tuple[str, ...] = ()
        self._lock = threading.Lock()
        self._group: tuple[int, ProcessGroup] | None = None
        self._stream: Any = None

    def send(self, state: State) -> Sent:
        taken = self._snapshots.take(state)
        return Sent(taken.layout, taken.number, taken.layout.bytes)

    def offer(self, sent: Sent, receivers: Sequence[str], *, again: bool = False) -> Offer:
        if again or tuple(receivers) != self._receivers:
            self._session += 1
            self._receivers = tuple(receivers)
        return Offer((sent.content, self._session, self._receivers), sent.number, meets=True)

    def serve(self, offer: Offer) -> None:
        with self._on_device():
            self._broadcast(self._snapshots.get(offer.number).flat, offer, place=0)

    def forget(self, sent: Sent) -> None:
        self._snapshots.forget(sent.number)

    async def receive(self, offer: Offer) -> dict[str, torch.Tensor]:
        layout, _, receivers = offer.content
        place = 1 + receivers.index(self._name)

        def receive() -> dict[str, torch.Tensor]:
            # Allocated on the stream that fills it: on another its memory might still be in use.
            with self._on_device():
                flat = torch.empty(layout.bytes, dtype=torch.uint8, device=self._device)
                self._broadcast(flat, offer, place=place)
            views: dict[str, torch.Tensor] = layout.views(flat)
            return views

        return await self._blocking(receive)

    def _broadcast(self, flat: torch.Tensor, offer: Offer, *, place: int) -> None:
        _, session, receivers = offer.content
        group = None
        try:
            group = self._joined(session, place, 1 + len(receivers))
            group.broadcast(flat)
        except RuntimeError as error:
            self._leave(session, group)
            raise Overdue(
                f"{self._name} did not finish a broadcast of {flat.numel()} bytes to {', '.join(receivers)} within "
                f"{self._timeout_s:g} s (half of trainer.publish_timeout_s): {error}"
            ) from error

    def _joined(self, session: int, place: int, size: int) -> ProcessGroup:
        """Return the session's group; whatever hangs in an older one ends with an error."""
        with self._lock:
            if self._group is not None and self._group[0] == session:
                return self._group[1]
            old, self._group = self._group, None
        if old is not None:
            old[1].abort()
        group = ProcessGroup(
            self._meeting,
            f"weights/{session}",
            place=place,
            size=size,
            backend=self._backend,
            timeout_s=self._timeout_s,
        )
        with self._lock:
            # One of an older session, which was given up, may come to its end only now.
            if self._group is None or self._group[0] < session:
                self._group = (session, group)
        return group

    def _leave(self, session: int, group: ProcessGroup | None) -> None:
        with self._lock:
            if self._group is not None and self._group[0] == session:
                self._group = None
        if group is not None:
            group.abort()

    def _on_device(self) -> AbstractContextManager[Any]:
        """Return the context of work on a GPU: a stream of its own, beside that of training or decoding."""
        if self._device.type != "cuda":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._stream)
