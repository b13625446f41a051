"""New weights, staged beside those that serve, and swapped in at once.

Invariant: nothing of the model changes before all names and shapes are checked and every tensor lies on its device;
the swap itself copies on the device, or exchanges references, and cannot fail halfway.
"""

from collections.abc import Mapping
from typing import Any

import torch

from asyncrl.engine.errors import VersionError


class Staged:
    """Tensors on the model's device and of its types, ready to be swapped in."""

    def __init__(self, pairs: list[tuple[torch.Tensor, torch.Tensor]], ready: Any) -> None:
        self._pairs = pairs
        self._ready = ready
        self.bytes = sum(staged.nbytes for _, staged in pairs)

    def swap(self) -> None:
        """Put the staged weights into the model."""
        if self._ready is None:
            for target, staged in self._pairs:
                target.data = staged
            return
        torch.cuda.current_stream().wait_event(self._ready)
        # Captured graphs read from where the weights were when they were captured. All are copied by a few kernels: on
        # a GPU that ranks share, each kernel waits for its turn.
        targets, staged_ones = zip(*((target.data, staged) for target, staged in self._pairs), strict=True)
        torch._foreach_copy_(targets, staged_ones, non_blocking=True)
        # How long the pause was is told by when the device is done.
        torch.cuda.current_stream().synchronize()


def stage(model: Any, state: Mapping[str, Any]) -> Staged:
    """Check names and shapes of `state`, and copy it beside the model; VersionError names what differs.

    Of tied weights one name is enough; the first that comes counts.
    """
    mine = model.state_dict(keep_vars=True)
    named = {id(mine[name]) for name in state if name in mine}
    differ = sorted(name for name, tensor in mine.items() if id(tensor) not in named)
    differ += sorted(name for name in state if name not in mine or mine[name].shape != state[name].shape)
    if differ:
        raise VersionError(f"{len(differ)} of {len(mine)} weights differ in name or shape, first {differ[0]}")
    chosen = {id(mine[name]): (mine[name], state[name]) for name in reversed(list(state))}
    device = next(model.parameters()).device
    if device.type != "cuda":
        # The caller may go on changing its own.
        return Staged([(to, new.detach().to(to.device, to.dtype, copy=True)) for to, new in chosen.values()], None)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.stream(stream):
        pairs = [
            (to, new.detach().to(to.device, to.dtype, non_blocking=True, copy=True)) for to, new in chosen.values()
        ]
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(stream)
    ready.synchronize()
    return Staged(pairs, ready)
