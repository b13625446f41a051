"""Whether a model computes with the weights of a file: asked of what its layers give, not of what they say they hold.

A layer is given unit vectors, so that what it gives are columns of its weights, to the bit: each product but one is
zero. A kernel's packed copy of old weights is found out by one update, however small.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

_COLUMNS = 4
_HEADS = ("lm_head", "embed_tokens")


class OpenFiles:
    """The weights of a safetensors file, or of all those in a folder; nothing is read before it is asked for."""

    def __init__(self, path: Path) -> None:
        self._stack = ExitStack()
        self._file_of: dict[str, Any] = {}
        for file in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
            opened = self._stack.enter_context(safe_open(file, framework="pt"))
            self._file_of.update(dict.fromkeys(opened.keys(), opened))

    def __enter__(self) -> "OpenFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def names(self) -> set[str]:
        return set(self._file_of)

    def tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def shape(self, name: str) -> list[int]:
        return list(self._file_of[name].get_slice(name).get_shape())

    def columns(self, name: str, chosen: range) -> torch.Tensor:
        """Return columns of a matrix: all rows, and of those what is chosen."""
        columns: torch.Tensor = self._file_of[name].get_slice(name)[:, chosen.start : chosen.stop]
        return columns


def differing_modules(model: torch.nn.Module, weights: OpenFiles) -> tuple[int, list[str]]:
    """Return how many modules of `model` were compared with a file, and the names of those that differ.

    Compared are linear layers, joined ones (q, k and v) too, the output layer, and whatever holds a weight of the
    name and shape that the file has. An output layer that could not be compared counts as differing.
    """
    names = weights.names()
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    compared, differing, head = 0, [], False
    for name, module in model.named_modules():
        sources = _sources(name, packed, names)
        if not sources:
            continue
        same = _same(module, sources, weights)
        if same is None:
            continue
        compared += 1
        head = head or (name.rpartition(".")[2] in _HEADS and _computes(module))
        if not same:
            differing.append(name)
    return compared, differing if head else [*differing, "the output layer, which was not found"]


def _sources(name: str, packed: Mapping[str, list[str]], names: set[str]) -> list[str]:
    """Return the file's names for a module's weight: one, or several that it has joined; none if unknown."""
    last = name.rpartition(".")[2]
    parent = name.removesuffix(last)
    if f"{name}.weight" in names:
        return [f"{name}.weight"]
    if last == "lm_head":
        # Tied: the file has the embedding alone.
        return [other for other in sorted(names) if other.endswith("embed_tokens.weight")][:1]
    joined = [f"{parent}{part}.weight" for part in packed.get(last, ())]
    return joined if joined and names.issuperset(joined) else []


def _computes(module: torch.nn.Module) -> bool:
    """Whether a module multiplies by its weight with a kernel of its own choice."""
    return hasattr(getattr(module, "quant_method", None), "apply")


def _same(module: torch.nn.Module, sources: list[str], weights: OpenFiles) -> bool | None:
    """Return whether a module has these weights; None if it cannot be told (split over ranks, another layout)."""
    found = [check(module, sources, weights) for check in (_computes_same, _holds_same)]
    told = [same for same in found if same is not None]
    return all(told) if told else None


def _holds_same(module: torch.nn.Module, sources: list[str], weights: OpenFiles) -> bool | None:
    weight = getattr(module, "weight", None)
    if weight is None or len(sources) != 1:
        return None
    rows, *rest = weights.shape(sources[0])
    # A vocabulary may be padded: further rows at the end.
    if weight.ndim != 1 + len(rest) or list(weight.shape[1:]) != rest or weight.shape[0] < rows:
        return None
    expected = weights.tensor(sources[0]).to(weight.device, weight.dtype)
    return torch.equal(weight[:rows], expected)


def _computes_same(module: torch.nn.Module, sources: list[str], weights: OpenFiles) -> bool | None:
    if not _computes(module):
        return None
    shapes = [weights.shape(source) for source in sources]
    if any(len(shape) != 2 for shape in shapes):
        return None
    rows, width = sum(shape[0] for shape in shapes), shapes[0][1]
    for first in _starts(width):
        chosen = range(first, min(first + _COLUMNS, width))
        given = _columns(module, width, chosen)
        if given is None or given.shape[1] < rows:
            return None
        columns = torch.cat([weights.columns(source, chosen) for source in sources])
        if not torch.equal(given[:, :rows].cpu(), columns.t().to("cpu", given.dtype)):
            return False
    return True


def _starts(width: int) -> Iterator[int]:
    """Yield the first columns of what is compared: at the beginning, in the middle and at the end."""
    yield from sorted({0, width // 2, max(0, width - _COLUMNS)})


def _columns(module: Any, width: int, chosen: range) -> torch.Tensor | None:
    """Return columns of a module's weight as its kernel gives them, (columns, rows); None if it takes another width."""
    parameter = next(module.parameters(), None)
    if parameter is None or getattr(module, "input_size_per_partition", width) != width:
        return None
    unit = torch.zeros(len(chosen), width, dtype=parameter.dtype, device=parameter.device)
    unit[range(len(chosen)), chosen] = 1
    with torch.no_grad():
        result: torch.Tensor = module.quant_method.apply(module, unit, None)
    return result
