"""Tensors that leave their device for the host's memory, and come back, while others hold them.

Invariant: a tensor stays the same object, of the same values and layout; only where its numbers lie changes. So nobody
may keep the address of what may leave: a captured CUDA graph does.
"""

from collections.abc import Iterable

import torch


class OffLoad:
    """Moves tensors of `device`, and of no other. Buffers in the host's memory are kept for the next time.

    On a GPU they are pinned. On a CPU the numbers move from one place in its memory to another.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._away: dict[int, torch.Tensor] = {}
        self._buffers: dict[int, torch.Tensor] = {}

    @property
    def is_away(self) -> bool:
        """Whether anything is in the host's memory now."""
        return bool(self._away)

    def leave(self, tensors: Iterable[torch.Tensor]) -> int:
        """Move tensors to the host's memory; return how many bytes of the device that frees."""
        leaving = {id(tensor): tensor for tensor in tensors if tensor.device == self._device and tensor.numel()}
        self._buffers = {number: self._buffers[number] for number in leaving if number in self._buffers}
        copies = {}
        for number, tensor in leaving.items():
            copies[number] = self._buffers[number] = _like(tensor.data, self._buffers.get(number))
            copies[number].copy_(tensor.data, non_blocking=True)
        self._wait()
        for number, tensor in leaving.items():
            tensor.data = copies[number]
        self._away.update(leaving)
        release(self._device)
        return sum(tensor.nbytes for tensor in leaving.values())

    def come_back(self) -> None:
        """Move everything back, with what it holds by now."""
        for tensor in self._away.values():
            there = torch.empty_like(tensor.data, device=self._device)
            tensor.data = there.copy_(tensor.data, non_blocking=True)
        self._wait()
        self._away.clear()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def release(device: torch.device) -> None:
    """Give memory that PyTorch holds and nothing uses back to the device, for other processes."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


def _like(value: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """Return a place in the host's memory for a value: the buffer from before, if it fits."""
    if before is not None and (before.shape, before.dtype, before.stride()) == (
        value.shape,
        value.dtype,
        value.stride(),
    ):
        return before
    return torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
