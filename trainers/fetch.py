"""How a rank gets its rows: it reads them itself, or the leader of its siblings reads and broadcasts them.

`independent`: every rank reads. `leader`: the leader reads once, and broadcasts a description of the shapes and then
the tensors. `auto`: leader if there are siblings, as where Megatron divides a replica over ranks.
"""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import torch

from asyncrl.engine.data_plane.base import DataPlane
from asyncrl.engine.errors import AsyncRLError, DataPlaneError
from asyncrl.trainers.siblings import Siblings

Policy = Literal["independent", "leader", "auto"]
Values = dict[str, list[Any]]


class Fetch(Protocol):
    async def read(self, keys: Sequence[str], columns: Sequence[str]) -> Values:
        """Return, per column, one value per key in the order of `keys`.

        Values may be views of memory that others share: never write into them.
        """


class Independent:
    """Reads for itself."""

    def __init__(self, plane: DataPlane, partition: str) -> None:
        self._plane = plane
        self._partition = partition

    async def read(self, keys: Sequence[str], columns: Sequence[str]) -> Values:
        return await self._plane.read(self._partition, keys, columns)


class _Layout(msgspec.Struct, frozen=True):
    dtype: str
    shapes: list[tuple[int, ...]]


class _Description(msgspec.Struct, frozen=True):
    """What the leader will send: an error, or the layout of every column."""

    error: str = ""
    columns: dict[str, _Layout] = {}


class Leader:
    """Reads once for all siblings. A failed read fails on all of them, so that nobody waits for tensors."""

    def __init__(self, fetch: Fetch, siblings: Siblings) -> None:
        self._fetch = fetch
        self._siblings = siblings

    async def read(self, keys: Sequence[str], columns: Sequence[str]) -> Values:
        if self._siblings.index == 0:
            return await self._lead(keys, columns)
        return await self._follow(keys)

    async def _lead(self, keys: Sequence[str], columns: Sequence[str]) -> Values:
        try:
            values = await self._fetch.read(keys, columns)
            layouts = {name: _layout(name, rows) for name, rows in values.items()}
        except AsyncRLError as error:
            await self._describe(_Description(error=f"{type(error).__name__}: {error}"))
            raise
        await self._describe(_Description(columns=layouts))
        for rows in values.values():
            flat = torch.cat([row.detach().cpu().reshape(-1) for row in rows]).view(torch.uint8)
            if flat.numel():
                await self._siblings.broadcast(flat)
        return values

    async def _follow(self, keys: Sequence[str]) -> Values:
        size = int(await self._siblings.broadcast(torch.zeros(1, dtype=torch.int64)))
        text = await self._siblings.broadcast(torch.zeros(size, dtype=torch.uint8))
        description = msgspec.json.decode(text.numpy().tobytes(), type=_Description)
        if description.error:
            raise DataPlaneError(f"the leader of the siblings could not read {len(keys)} keys: {description.error}")
        values: Values = {}
        for name, layout in description.columns.items():
            sizes = [int(np.prod(shape)) for shape in layout.shapes]
            flat = torch.zeros(sum(sizes), dtype=getattr(torch, layout.dtype))
            if flat.numel():
                await self._siblings.broadcast(flat.view(torch.uint8))
            parts = zip(torch.split(flat, sizes), layout.shapes, strict=True)
            values[name] = [part.reshape(shape) for part, shape in parts]
        return values

    async def _describe(self, description: _Description) -> None:
        text = torch.frombuffer(bytearray(msgspec.json.encode(description)), dtype=torch.uint8)
        await self._siblings.broadcast(torch.tensor([text.numel()], dtype=torch.int64))
        await self._siblings.broadcast(text)


def _layout(name: str, rows: Sequence[Any]) -> _Layout:
    if not all(isinstance(row, torch.Tensor) and row.dtype == rows[0].dtype for row in rows):
        raise DataPlaneError(f"column {name!r} is not of tensors of one dtype, so siblings cannot share it")
    return _Layout(str(rows[0].dtype).removeprefix("torch."), [tuple(row.shape) for row in rows])


def fetch_for(policy: Policy, plane: DataPlane, partition: str, *, siblings: Siblings) -> Fetch:
    """Return the fetch of a policy; with one rank per replica, all are independent."""
    independent = Independent(plane, partition)
    if siblings.count == 1 or policy == "independent":
        return independent
    return Leader(independent, siblings)
