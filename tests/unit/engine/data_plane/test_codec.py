"""The codec: padded and jagged layouts, and a row's one buffer, without losing a bit."""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.engine.data_plane.codec import decode_row, encode_row, from_wire, pad_rows, to_wire
from asyncrl.engine.data_plane.rows import assemble
from asyncrl.engine.errors import DataPlaneError, MissingRows
from asyncrl.engine.testing.conformance.plane_contract import same_bits

LENGTHS = (3, 1, 5)


def rows(*lengths: int) -> list[torch.Tensor]:
    return [torch.arange(1, n + 1) + 10 * i for i, n in enumerate(lengths)]


def unbound(wire: Any) -> list[list[Any]]:
    assert wire.is_nested
    return [row.tolist() for row in wire.unbind()]


def test_right_padding_is_stripped_by_length() -> None:
    padded = pad_rows(rows(*LENGTHS), -1)
    assert unbound(to_wire({"ids": padded}, LENGTHS)["ids"]) == [row.tolist() for row in rows(*LENGTHS)]


def test_only_a_tensor_of_the_longest_length_is_per_token() -> None:
    columns = {"four": torch.ones(3, 4), "flat": torch.ones(3), "deep": torch.ones(3, 5, 2)}
    wire = to_wire(columns, LENGTHS)
    assert isinstance(wire["deep"], torch.Tensor)
    assert wire["four"] is columns["four"]
    assert wire["flat"] is columns["flat"]
    assert [tuple(row.shape) for row in wire["deep"].unbind()] == [(3, 2), (1, 2), (5, 2)]


def test_a_known_per_token_column_is_cut_from_its_rounded_up_length() -> None:
    rounded = pad_rows(rows(*LENGTHS), 0, pad_to=8)
    assert to_wire({"ids": rounded}, LENGTHS)["ids"] is rounded
    assert unbound(to_wire({"ids": rounded}, LENGTHS, frozenset({"ids"}))["ids"]) == [
        r.tolist() for r in rows(*LENGTHS)
    ]


def test_without_lengths_nothing_is_stripped() -> None:
    padded = pad_rows(rows(*LENGTHS))
    assert to_wire({"ids": padded}, None, frozenset({"ids"}))["ids"] is padded


@pytest.mark.parametrize("shape", [(2, 5), (3, 4)], ids=["a row too few", "tokens too few"])
def test_a_per_token_column_that_does_not_fit_its_lengths_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(DataPlaneError, match=r"'ids'.*3 rows of up to 5"):
        to_wire({"ids": torch.ones(shape)}, LENGTHS, frozenset({"ids"}))


def test_lists_stack_when_equal_and_nest_when_ragged() -> None:
    equal = [torch.ones(2), torch.zeros(2)]
    assert same_bits(torch.stack(equal), torch.as_tensor(to_wire({"x": equal}, None)["x"]))
    assert unbound(to_wire({"x": rows(2, 0)}, None)["x"]) == [[1, 2], []]


def test_equal_lengths_are_padded_like_ragged_ones() -> None:
    """E7: the common absolute length holds for a batch whose rows happen to be equally long."""
    wire = to_wire({"ids": rows(4, 4), "other": [torch.ones(2)] * 2}, (4, 4))
    padded = from_wire(wire, pad_to=6)
    assert padded["ids"].shape == (2, 6)
    assert padded["other"].shape == (2, 2)


def test_object_arrays_pass_through_and_other_types_are_refused() -> None:
    objects = np.array(["a", None, {"x": 1}], dtype=object)
    wire = to_wire({"o": objects}, LENGTHS)
    assert wire["o"] is objects
    assert from_wire(wire)["o"] is objects
    for odd in ("text", np.ones(3), ["a", "b"], [torch.ones(1), "b"], []):
        with pytest.raises(TypeError, match="'odd'"):
            to_wire({"odd": odd}, LENGTHS)


def test_padding_has_a_value_by_column_and_one_absolute_length() -> None:
    wire = to_wire({"ids": rows(2, 1), "mask": rows(1, 2)}, None)
    padded = from_wire(wire, pad_values={"ids": -100}, pad_to=3)
    assert torch.as_tensor(padded["ids"]).tolist() == [[1, 2, -100], [11, -100, -100]]
    assert torch.as_tensor(padded["mask"]).tolist() == [[1, 0, 0], [11, 12, 0]]
    assert from_wire(wire)["ids"].shape == (2, 2)
    assert from_wire(wire, layout="jagged")["ids"] is wire["ids"]
    with pytest.raises(DataPlaneError, match=r"'ids'.*2 tokens.*1"):
        from_wire(wire, pad_to=1)


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    extra=st.integers(0, 3),
    trailing=st.sampled_from([(), (2,)]),
    dtype=st.sampled_from([torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.bool]),
)
@settings(deadline=None, max_examples=40)
def test_the_wire_loses_nothing(lengths: list[int], extra: int, trailing: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    values = [(torch.randn(n, *trailing, generator=generator) * 9).to(dtype) for n in lengths]
    padded = pad_rows(values, 1, pad_to=(max(lengths) + extra) or None)
    wire = to_wire({"x": padded}, lengths, frozenset({"x"}))
    for got, put in zip(torch.as_tensor(wire["x"]).unbind(), values, strict=True):
        assert same_bits(got, put)
    back = torch.as_tensor(from_wire(wire, pad_values={"x": 1}, pad_to=padded.shape[1] or None)["x"])
    assert same_bits(back, padded)


_DTYPES = st.sampled_from(
    [torch.bool, torch.uint8, torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.float64]
)
_OBJECTS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.data())
@settings(deadline=None, max_examples=40)
def test_a_packed_row_comes_back_bit_by_bit(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 4))
    shapes = st.lists(st.integers(0, 3), max_size=3)
    columns: dict[str, list[Any]] = {}
    for number in range(data.draw(st.integers(1, 4))):
        dtype = data.draw(_DTYPES)
        columns[f"tensors{number}"] = []
        for _ in range(size):
            shape = data.draw(shapes)
            item = torch.empty(0, dtype=dtype).element_size()
            raw = data.draw(st.binary(min_size=item * int(np.prod(shape)), max_size=item * int(np.prod(shape))))
            bits = torch.tensor(list(raw), dtype=torch.uint8)
            value = bits % 2 == 1 if dtype is torch.bool else bits.view(dtype)
            columns[f"tensors{number}"].append(value.reshape(shape))
    columns["objects"] = [data.draw(_OBJECTS) for _ in range(size)]
    keys = [f"v0_p0_g{i}" for i in range(size)]
    got_keys, values = decode_row(encode_row("v0_p0", keys, columns), "v0_p0", [*columns, "absent"])
    assert got_keys == keys
    assert sorted(values) == sorted(columns)
    for name, column in columns.items():
        for got, put in zip(values[name], column, strict=True):
            if isinstance(put, torch.Tensor):
                assert same_bits(got, put)
            else:
                assert repr(got) == repr(put)


def test_a_recycled_slot_is_noticed() -> None:
    buffer = encode_row("v0_p1", ["v0_p1_g0"], {"x": [torch.ones(1)]})
    with pytest.raises(MissingRows, match=r"v0_p0.*v0_p1"):
        decode_row(buffer, "v0_p0", ["x"])


def _damaged() -> Iterator[tuple[str, torch.Tensor]]:
    """Packed rows that another writer made, or that broke off, with a word of what is wrong."""
    keys = ["v0_p0_g0", "v0_p0_g1"]
    whole = encode_row("v0_p0", keys, {"x": [torch.ones(3), torch.ones(2)]})
    good: dict[str, Any] = {"dtype": "float32", "shapes": [[3], [2]], "at": 0, "bytes": 20}
    for size in (0, 7, 8, 40, whole.numel() - 16):
        yield "", whole[:size]
    yield "header", torch.zeros(64, dtype=torch.uint8)
    yield "header", torch.full((64,), 255, dtype=torch.uint8)
    for change, word in (
        ({"at": 16}, "from 16"),
        ({"at": -16}, "at"),
        ({"at": 1}, "from 1 on"),
        ({"bytes": 24}, "24 bytes"),
        ({"bytes": 2**60}, "bytes"),
        ({"shapes": [[3]]}, "3 values"),
        ({"shapes": [[5]]}, "1 values for 2 keys"),
        ({"shapes": [[-3], [8]]}, "shapes"),
        ({"dtype": "complex64"}, "complex64"),
        ({"objects": [1]}, "1 values for 2 keys"),
    ):
        header = msgspec.msgpack.encode({"row": "v0_p0", "keys": keys, "columns": {"x": {**good, **change}}})
        start = len(header).to_bytes(8, "little") + header
        data = start + bytes(-len(start) % 16) + bytes(32)
        yield word, torch.frombuffer(bytearray(data), dtype=torch.uint8)
    odd: tuple[Any, ...] = ({"row": "v0_p0"}, ["v0_p0"], {"row": "v0_p0", "keys": [1], "columns": {}})
    for raw in map(msgspec.msgpack.encode, odd):
        yield "header", torch.frombuffer(bytearray(len(raw).to_bytes(8, "little") + raw), dtype=torch.uint8)


def test_bytes_that_are_not_what_their_header_says_are_refused_with_the_rows_name() -> None:
    """FOUND-I12: offsets and lengths that another writer left are looked at before they are used."""
    for copy in (False, True):
        for word, buffer in _damaged():
            with pytest.raises(DataPlaneError, match=f"v0_p0.*{word}"):
                decode_row(buffer, "v0_p0", ["x"], copy=copy)


def test_bytes_of_other_keys_than_the_rows_are_refused() -> None:
    """FOUND-I12: they would stand in for what another row holds."""
    buffer = encode_row("v0_p0#adv#rank0", ["v0_p1_g0"], {"adv": [1]})
    with pytest.raises(DataPlaneError, match=r"v0_p0#adv#rank0.*v0_p1_g0"):
        assemble(["v0_p1_g0"], ["adv"], {"v0_p0#adv#rank0": buffer})
    buffer = encode_row("v0_p0", ["v0_p0_g0"], {"x": [1]})
    for key, column in (("v0_p0_g1", "x"), ("v0_p0_g0", "y")):
        with pytest.raises(MissingRows, match=f"{key}.*{column}"):
            assemble([key], [column], {"v0_p0": buffer})


def test_a_read_tensor_does_not_keep_the_whole_row_alive() -> None:
    buffer = encode_row("v0_p0", ["v0_p0_g0"], {"big": [torch.zeros(10_000)], "small": [torch.ones(1)]})
    _, values = decode_row(buffer, "v0_p0", ["small"])
    assert values["small"][0].untyped_storage().nbytes() == 4


@pytest.mark.parametrize(
    "values",
    [
        [torch.ones(1), torch.ones(1, dtype=torch.int32)],
        [torch.ones(1), "text"],
        [torch.ones(1, dtype=torch.complex64)] * 2,
        [{1}, None],
        [(1, 2), [1, 2]],
        [np.float64(1), 1.0],
        [2**64, 0],
        [[{"deep": object()}], None],
    ],
    ids=["dtypes", "kinds", "complex", "set", "tuple", "numpy", "big", "deep"],
)
def test_what_would_not_come_back_as_it_is_cannot_be_packed(values: list[Any]) -> None:
    with pytest.raises(TypeError, match=r"v0_p0: column 'odd'"):
        encode_row("v0_p0", ["v0_p0_g0", "v0_p0_g1"], {"odd": values})
