"""Weights through memory of one GPU that two processes of a host share.

Invariant: receivers copy out of a buffer that is written to again only after its version was forgotten.
"""

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from asyncrl.engine.aio.blocking import Blocking
from asyncrl.engine.errors import VersionError
from asyncrl.engine.weights.base import Offer, Sent, State, WeightTransport
from asyncrl.engine.weights.snapshots import Snapshots


class CudaIPC(WeightTransport):
    """The content is (layout, how to open the buffer). `device` is where a receiver wants its copy."""

    def __init__(self, device: torch.device, *, blocking: "Blocking[dict[str, torch.Tensor]]") -> None:
        self._device = device
        self._blocking = blocking
        self._snapshots = Snapshots(device)

    def send(self, state: State) -> Sent:
        taken = self._snapshots.take(state)
        if not taken.flat.is_cuda:
            raise VersionError("cuda_ipc carries weights that lie on a GPU; trainer.device must be cuda")
        buffer = taken.buffer
        if buffer.handle is None:
            # Once per buffer: each call wraps its memory once more, for good.
            buffer.handle = reduce_tensor(buffer.memory)[1]  # type: ignore[no-untyped-call]
        return Sent((taken.layout, buffer.handle), taken.number, taken.layout.bytes)

    def forget(self, sent: Sent) -> None:
        self._snapshots.forget(sent.number)

    async def receive(self, offer: Offer) -> dict[str, torch.Tensor]:
        layout, handle = offer.content

        def copy() -> dict[str, torch.Tensor]:
            shared = rebuild_cuda_tensor(*handle)  # type: ignore[no-untyped-call]
            own = shared[: layout.bytes].to(self._device, copy=True)
            # Done before anybody says so: the sender then writes to the buffer again.
            torch.cuda.synchronize(shared.device)
            torch.cuda.synchronize(self._device)
            views: dict[str, torch.Tensor] = layout.views(own)
            return views

        return await self._blocking(copy)
