"""megatron-core imported, and on a machine without CUDA what it asks of a GPU answered by the CPU.

Written for megatron-core 0.19.2, whose private names it replaces. `prepare` comes before any other import of megatron.
"""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@cache
def prepare() -> None:
    """Import megatron, also without Triton, and make its calls of `torch.cuda` harmless without CUDA."""
    if importlib.util.find_spec("triton") is None:
        # One module of megatron needs Triton for kernels that nothing here calls. A stand-in for Triton itself would
        # be taken for the real one by torch.compile.
        kernels: Any = ModuleType("megatron.core.transformer.moe.ops.paged_stash")
        kernels.GLOBAL_BLOCK_SIZE = 1024
        kernels.paged_stash_copy_kernel = kernels.paged_stash_pop_kernel = None
        sys.modules[kernels.__name__] = kernels
    # That these are not installed is known.
    warnings.filterwarnings("ignore", message=r".*(Apex|Transformer Engine|absl\.logging).* not installed")
    storage: Any = torch.storage
    loads = storage._load_from_bytes
    importlib.import_module("megatron.core")
    # megatron puts a function of its own there, which would be named in every tensor that is pickled: a process that
    # has no megatron could not read what a rank sends.
    storage._load_from_bytes = loads
    if torch.cuda.is_available():
        return
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    cuda.manual_seed = torch.manual_seed
    cuda.synchronize = cuda.empty_cache = lambda *_: None
    cuda.current_stream = lambda *_: _Stream()
    cuda.Stream = _Stream
    cuda.stream = lambda _: nullcontext()
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    from megatron.core.transformer.moe import token_dispatcher

    # What is on the CPU already would stay a tensor, which the exchange between ranks of experts does not take.
    token_dispatcher.maybe_move_tensor_to_cpu = _on_host
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of every call of megatron, which computes on the current device. It holds for one thread."""
    if not torch.cuda.is_available():
        return _CudaIsCpu()
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


class _Stream:
    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, *_: Any) -> "_Stream":
        return self  # An event is waited for, like a stream.


class _CudaIsCpu(TorchFunctionMode):
    """Tensors that are to be made on a GPU are made on the CPU, and say that they are on a GPU if asked by type."""

    def __torch_function__(
        self, function: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if str(named.get("device", "")).startswith("cuda"):
            named["device"] = "cpu"
        if named.get("pin_memory"):
            named["pin_memory"] = False
        if function is torch.Tensor.cuda:
            return args[0]
        found = function(*args, **named)
        if function is torch.Tensor.type and len(args) == 1 and not named:
            # megatron finds out what a parameter is by comparing this text.
            return found.replace("torch.", "torch.cuda.", 1)
        return found
