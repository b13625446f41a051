"""A packed row's arguments: bounds of samples for kernels, masks elsewhere, and what is refused."""

from typing import Any

import pytest
import torch

from asyncrl.engine.errors import ConfigError
from asyncrl.trainers.backends.layout import Layout, suits_rows
from asyncrl.trainers.backends.packing import Packing, has_varlen, varlen_attention

CPU = torch.device("cpu")


def test_positions_start_anew_and_nobody_sees_a_neighbour() -> None:
    """D10: three samples of 3, 1 and 2 tokens in one row."""
    found = Packing([3, 1, 2]).arguments(CPU, torch.float64)
    assert found["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1]]
    allowed = (found["attention_mask"][0, 0] == 0).int().tolist()
    assert allowed == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]


def test_kernels_get_the_bounds_of_samples() -> None:
    found = Packing([3, 1, 5])._bounds(CPU)
    assert found["cu_seq_lens_q"].tolist() == found["cu_seq_lens_k"].tolist() == [0, 3, 4, 9]
    assert found["cu_seq_lens_q"].dtype == torch.int32
    assert (found["max_length_q"], found["max_length_k"]) == (5, 5)


@pytest.mark.parametrize(
    ("device", "dtype", "there"),
    [("cpu", torch.bfloat16, False), ("cuda", torch.float32, False), ("cuda", torch.bfloat16, True)],
)
def test_the_kernel_is_for_half_precision_on_a_gpu(device: str, dtype: torch.dtype, there: bool) -> None:
    assert has_varlen(torch.device(device), dtype) is there


@pytest.mark.parametrize("odd", ["softcap", "s_aux"])
def test_attention_that_the_kernel_lacks_is_refused_with_the_option_to_change(odd: str) -> None:
    one = torch.ones(1, 1, 1, 8)
    options: dict[str, Any] = {odd: torch.ones(1)}
    with pytest.raises(ConfigError, match=r"set trainer\.packed to false"):
        varlen_attention(object(), one, one, one, None, cu_seq_lens_q=torch.tensor([0, 1]), max_length_q=1, **options)


def test_the_rest_of_a_row_is_no_longer_than_its_longest_sample() -> None:
    """A model may have no position beyond, and some rotate all positions by the longest of a pass."""
    tokens = [torch.arange(1, 4), torch.arange(1, 3)]
    for pad_to, lengths in ((0, [3, 2]), (5, [3, 2]), (7, [3, 2, 2]), (12, [3, 2, 3, 3, 1])):
        layout = Layout.packed(tokens, pad_id=0, pad_to=pad_to)
        assert layout.packing is not None
        assert list(layout.packing.lengths) == lengths
        assert layout.ids.shape == (1, max(5, pad_to))


@pytest.mark.parametrize(
    ("lengths", "suits"),
    [
        ([1024], True),
        ([1023], False),
        ([2048, 2048, 2048], True),
        ([2048, 2016, 1986], True),  # 94 of padding for 6,050 tokens.
        ([2048, 2016, 1984], False),  # 96 for 6,048.
        ([2048, 40], False),
    ],
)
def test_samples_suit_rows_if_they_are_long_and_alike(lengths: list[int], suits: bool) -> None:
    assert suits_rows([torch.ones(length) for length in lengths]) is suits
