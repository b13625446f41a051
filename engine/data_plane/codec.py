"""Between tensors and bytes: padding and jagged layouts, and one buffer per group row.

The round trip is lossless: values bit by bit, dtypes and shapes, also for empty rows,
bfloat16, NaN and infinities. No pickle: tensors are raw bytes, objects are MessagePack.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import torch

from asyncrl.engine.bounds import MOST_DIMENSIONS
from asyncrl.engine.errors import DataPlaneError, MissingRows

_ALIGN = 16
_LENGTH = struct.Struct("<Q")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.bool,
    )
}

Wire = torch.Tensor | np.ndarray[Any, Any]

_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Layout(msgspec.Struct, omit_defaults=True):
    """Where a column is in an encoded row: in `objects`, or so many bytes from `at` on."""

    objects: list[Any] | None = None
    dtype: str = ""
    shapes: list[list[_Count]] = []
    at: _Count = 0
    bytes: _Count = 0


class _Header(msgspec.Struct):
    """What an encoded row begins with; it names the row, so that a reader notices a recycled slot."""

    row: str
    keys: list[str]
    columns: dict[str, _Layout]


_HEADERS = msgspec.msgpack.Decoder(_Header)


def carries(dtype: torch.dtype) -> bool:
    """Return whether tensors of this dtype can be encoded."""
    return dtype in _DTYPES.values()


def _nest(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def to_wire(
    columns: Mapping[str, Any], lengths: Sequence[int] | None, per_token: frozenset[str] = frozenset()
) -> dict[str, Wire]:
    """Strip right padding by `lengths` (tokens per row). For stores between nodes, which do not exist yet.

    A tensor of shape (N, max length, …) becomes jagged, as does every column of `per_token`
    whatever its padded length; other tensors and object arrays pass through. Lists of tensors
    nest when ragged or when their rows have `lengths` tokens, and else stack. Other types are a TypeError. Without
    `lengths` nothing is stripped.
    """
    longest = max(lengths, default=0) if lengths is not None else -1
    wire: dict[str, Wire] = {}
    for name, column in columns.items():
        if isinstance(column, np.ndarray) and column.dtype == object:
            wire[name] = column
        elif isinstance(column, torch.Tensor):
            by_token = column.ndim >= 2 and (name in per_token or column.shape[1] == longest)
            if lengths is not None and by_token and not column.is_nested:
                if column.shape[0] != len(lengths) or column.shape[1] < longest:
                    raise DataPlaneError(
                        f"column {name!r} of shape {tuple(column.shape)} does not hold "
                        f"{len(lengths)} rows of up to {longest} tokens"
                    )
                wire[name] = _nest([row[:n] for row, n in zip(column, lengths, strict=True)])
            else:
                wire[name] = column
        elif isinstance(column, list) and column and all(isinstance(row, torch.Tensor) for row in column):
            by_token = lengths is not None and [row.shape[:1] for row in column] == [(n,) for n in lengths]
            same = len({row.shape for row in column}) == 1 and not by_token
            wire[name] = torch.stack(column) if same else _nest(column)
        else:
            raise TypeError(f"column {name!r} is {type(column).__name__}; it must be a tensor or an object array")
    return wire


def from_wire(
    wire: Mapping[str, Wire],
    layout: Literal["padded", "jagged"] = "padded",
    pad_values: Mapping[str, float] | None = None,
    pad_to: int | None = None,
) -> dict[str, Wire]:
    """Return columns as right-padded tensors (default) or as they came, jagged. Undoes `to_wire`.

    `pad_values` by column (default 0). `pad_to` is an absolute length in tokens, common to all
    ranks; a longer row is a DataPlaneError. Object columns come back as object arrays.
    """
    out: dict[str, Wire] = {}
    for name, column in wire.items():
        if layout == "jagged" or not isinstance(column, torch.Tensor) or not column.is_nested:
            out[name] = column
            continue
        out[name] = pad_rows(list(column.unbind()), (pad_values or {}).get(name, 0), pad_to, name=name)
    return out


def pad_rows(
    rows: Sequence[torch.Tensor], pad_value: float = 0, pad_to: int | None = None, *, name: str = "column"
) -> torch.Tensor:
    """Right-pad rows of shape (L_i, …) into one tensor (N, max L or `pad_to`, …)."""
    longest = max((row.shape[0] for row in rows), default=0)
    if pad_to is not None and longest > pad_to:
        raise DataPlaneError(f"{name!r} has a row of {longest} tokens, over the common length of {pad_to}")
    out = rows[0].new_full((len(rows), pad_to or longest, *rows[0].shape[1:]), pad_value)
    for i, row in enumerate(rows):
        out[i, : row.shape[0]] = row
    return out


def _not_plain(value: Any) -> str | None:
    """Return what in `value` MessagePack cannot bring back bit by bit, by type; None if nothing."""
    if type(value) is int:
        return None if -(2**63) <= value < 2**64 else f"the integer {value}"
    if value is None or type(value) in (bool, float, str, bytes):
        return None
    if type(value) is list:
        return next((odd for item in value if (odd := _not_plain(item))), None)
    if type(value) is dict:
        return _not_plain([*value.keys(), *value.values()])
    return f"an object of type {type(value).__name__}"


def _column_bytes(row: str, name: str, values: Sequence[Any]) -> tuple[dict[str, Any], list[torch.Tensor]]:
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if not tensors:
        odd = next((found for value in values if (found := _not_plain(value))), None)
        if odd is not None:
            raise TypeError(f"{row}: column {name!r} holds {odd}, which would not come back as it is")
        return {"objects": list(values)}, []
    if len(tensors) != len(values):
        raise TypeError(f"{row}: column {name!r} mixes tensors and other objects")
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise TypeError(f"{row}: column {name!r} mixes dtypes {sorted(map(str, dtypes))}")
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise TypeError(f"{row}: column {name!r} has dtype {dtype}; known are {sorted(_DTYPES)}")
    flat = torch.cat([tensor if tensor.ndim == 1 else tensor.reshape(-1) for tensor in tensors])
    shapes = [list(tensor.shape) for tensor in tensors]
    return {"dtype": dtype, "shapes": shapes}, [flat.detach().cpu().view(torch.uint8)]


def row_parts(row: str, keys: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> list[torch.Tensor]:
    """Return the pieces of an encoded row, uint8: header length, header, aligned data.

    The header names the row, so that a reader notices a recycled slot.
    """
    chunks: list[torch.Tensor] = []
    layout: dict[str, Any] = {}
    at = 0
    for name, values in columns.items():
        layout[name], raw = _column_bytes(row, name, values)
        if raw:
            size = sum(part.numel() for part in raw)
            layout[name] |= {"at": at, "bytes": size}
            filler = -size % _ALIGN
            chunks += [*raw, torch.zeros(filler, dtype=torch.uint8)]
            at += size + filler
    header = msgspec.msgpack.encode({"row": row, "keys": list(keys), "columns": layout})
    start = _LENGTH.pack(len(header)) + header
    start += bytes(-len(start) % _ALIGN)
    return [torch.frombuffer(bytearray(start), dtype=torch.uint8), *chunks]


def encode_row(row: str, keys: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> torch.Tensor:
    """Encode columns of one row into one uint8 tensor (bytes,)."""
    return torch.cat(row_parts(row, keys, columns))


def decode_row(
    buffer: torch.Tensor, row: str, columns: Sequence[str], *, copy: bool = True
) -> tuple[list[str], dict[str, list[Any]]]:
    """Return the keys of an encoded row and, per column asked for and present, one value per key.

    Without `copy` the values are views of `buffer`, which must be aligned to 16 bytes.
    MissingRows if the buffer belongs to another row than `row`; DataPlaneError if its bytes are not what its
    header says.
    """
    data = buffer.numpy()
    header, start = _header(data, row)
    if header.row != row:
        raise MissingRows(f"row {row} is gone; its place holds {header.row}")
    out: dict[str, list[Any]] = {}
    for name in columns:
        layout = header.columns.get(name)
        if layout is None:
            continue
        try:
            values = layout.objects if layout.objects is not None else _tensors(data, start, layout, copy=copy)
        except ValueError as error:
            raise DataPlaneError(f"{row}: column {name!r} has {error}") from error
        if len(values) != len(header.keys):
            raise DataPlaneError(f"{row}: column {name!r} has {len(values)} values for {len(header.keys)} keys")
        out[name] = values
    return header.keys, out


def _header(data: np.ndarray[Any, Any], row: str) -> tuple[_Header, int]:
    """Return the header of an encoded row, and where its data starts."""
    (length,) = _LENGTH.unpack_from(data.data) if data.size >= _LENGTH.size else (0,)
    end = _LENGTH.size + length
    if not _LENGTH.size < end <= data.size:
        raise DataPlaneError(f"{row}: its {data.size} bytes are not an encoded row, with a header of {length} bytes")
    try:
        return _HEADERS.decode(data[_LENGTH.size : end].data), end + -end % _ALIGN
    except msgspec.MsgspecError as error:
        raise DataPlaneError(f"{row}: its header cannot be read: {error}") from error


def _product(shape: list[int]) -> int:
    if len(shape) > MOST_DIMENSIONS:
        raise ValueError(f"a shape of {len(shape):,} dimensions; at most {MOST_DIMENSIONS} are read")
    return math.prod(shape)


def _tensors(data: np.ndarray[Any, Any], start: int, layout: _Layout, *, copy: bool) -> list[torch.Tensor]:
    """Return the tensors of a column; ValueError if its bytes are not there, or not as many as their shapes say."""
    dtype = _DTYPES.get(layout.dtype)
    if dtype is None:
        raise ValueError(f"dtype {layout.dtype!r}; known are {sorted(_DTYPES)}")
    sizes = [shape[0] if len(shape) == 1 else _product(shape) for shape in layout.shapes]
    count, first = sum(sizes), start + layout.at
    if layout.at % _ALIGN or first + layout.bytes > data.size or count * dtype.itemsize != layout.bytes:
        raise ValueError(
            f"{count} values of {layout.dtype} in {layout.bytes} bytes from {layout.at} on, of {data.size - start}"
        )
    if not count:
        flat = torch.empty(0, dtype=dtype)
    else:
        flat = torch.frombuffer(data, dtype=dtype, count=count, offset=first)
        # One copy per column: it is aligned, and does not keep the whole row's buffer alive.
        flat = flat.clone() if copy else flat
    parts = flat.split_with_sizes(sizes)
    return [part if len(shape) == 1 else part.reshape(shape) for part, shape in zip(parts, layout.shapes, strict=True)]
