"""Copies of tensors in host memory, whose buffers serve from save to save."""

from collections.abc import Mapping

import torch


class HostCopy:
    """Holds one copy. Its buffers are pinned for tensors of a GPU, and are reused while shapes and types stay.

    The memory stays in use until this object goes.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def reserve(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the memory for copies of these now: the first copy would take several times as long as the others."""
        for name, tensor in tensors.items():
            self._buffers[name] = _buffer(tensor, self._buffers.get(name))
            # The system finds room for a page when it is first written.
            self._buffers[name].zero_()

    def take(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Copy the tensors, and return the copies; they are whole once this returns, and change with the next call."""
        before, self._buffers = self._buffers, {}
        for name, tensor in tensors.items():
            self._buffers[name] = _buffer(tensor, before.pop(name, None))
        for name, tensor in tensors.items():
            self._buffers[name].copy_(tensor.detach(), non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return self._buffers


def _buffer(tensor: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    if before is not None and (before.shape, before.dtype) == (tensor.shape, tensor.dtype):
        return before
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
