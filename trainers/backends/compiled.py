"""Decoder layers and the loss's kernels, fused by torch.compile for whatever lengths come.

Unfused, a layer of a small model spends more time on starting kernels and on reading and writing than on products.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import structlog
import torch

log = structlog.get_logger()

Kernel = Callable[..., Any]


def compile_layers(model: Any) -> None:
    """Compile each decoder layer of a transformers model at its first pass; equal layers share what is compiled.

    Lengths are dynamic from the beginning, or the second one would compile anew. Warns of a model without layers that
    are marked as transformers marks them, which then runs as it is.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        log.warning("no layer of this model is known to torch.compile; it runs unfused", model=type(model).__name__)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


@cache
def compiled(kernel: Kernel) -> Kernel:
    """Return a function compiled for tensors of any number of rows; see `fixed_width`."""
    return torch.compile(kernel, dynamic=True)


def fixed_width(table: torch.Tensor) -> torch.Tensor:
    """Say that the second dimension of a table (rows, width) does not change: kernels know it then.

    Returned is the table without gradient. What has one, and what has none, would be compiled apart.
    """
    table = table.detach()
    torch._dynamo.mark_static(table, 1)
    return table


def apart(values: torch.Tensor) -> torch.Tensor:
    """Copy a few values out of what they are a part of: each place in a larger tensor would be compiled anew."""
    return values.detach().clone()


def eager() -> AbstractContextManager[Any]:
    """Return a context in which nothing is compiled, nor run compiled: a hook on a layer would stay in its code."""
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]
