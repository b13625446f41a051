"""Which columns ride along to a rank's model, and models that do not take them."""

from typing import Any

import pytest
from torch import nn

from asyncrl.engine.data_plane.base import Partition
from asyncrl.engine.errors import ConfigError
from asyncrl.trainers.extras import check_takes, extras_of


class Blind(nn.Module):
    def forward(self, input_ids: Any, attention_mask: Any = None, **more: Any) -> Any: ...


class Seeing(nn.Module):
    def forward(self, input_ids: Any, pixel_values: Any = None) -> Any: ...


class Wrapper(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any: ...


def test_tensors_beside_the_known_columns_ride_along_and_objects_do_not() -> None:
    columns = ("tokens", "logprobs", "pixel_values", "caption")
    assert extras_of(Partition("train", 2, columns, ("trainer",), ("caption",))) == ["pixel_values"]


def test_an_extra_that_the_model_would_pass_over_is_refused_by_name() -> None:
    """transformers' models take any keyword, and leave what they do not know."""
    with pytest.raises(
        ConfigError, match=r"'pixel_values', which Blind\.forward does not take; it takes input_ids, att"
    ):
        check_takes(Blind(), ["pixel_values"])


@pytest.mark.parametrize("model", [Seeing(), Wrapper()], ids=["named", "handed on"])
def test_an_extra_that_the_model_names_or_a_wrapper_hands_on_is_taken(model: nn.Module) -> None:
    check_takes(model, ["pixel_values"])
    check_takes(Blind(), [])
