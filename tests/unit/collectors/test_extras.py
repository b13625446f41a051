"""Extras that a task attaches: columns of the group, or the failure of the sample that does not bring them."""

from typing import Any

import pytest
import torch

from asyncrl.collectors.extras import check_extras, extra_columns
from asyncrl.collectors.outcome import SampleFailure
from asyncrl.collectors.tasks import Reward

IMAGE = torch.ones(2, 3, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("extras", "error", "words"),
    [
        ({}, ValueError, r"\[\]; its task declares \['image'\]"),
        ({"image": IMAGE, "sound": IMAGE}, ValueError, r"\['image', 'sound'\]; its task declares \['image'\]"),
        ({"image": [1.0, 2.0]}, TypeError, "'image' is list; it must be a tensor"),
        ({"image": torch.tensor(1.0)}, ValueError, r"'image' .* shape \(n, …\)"),
    ],
)
def test_a_reward_brings_exactly_the_tensors_that_its_task_declares(
    extras: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        check_extras(Reward(1.0, extras=extras), ["image"])
    check_extras(Reward(1.0, extras={"image": IMAGE}), ["image"])


def test_a_sample_that_failed_to_score_has_an_empty_tensor_of_its_siblings_kind() -> None:
    columns = extra_columns([SampleFailure("score_error", "blind"), Reward(1.0, extras={"image": IMAGE})])
    failed, scored = columns["image"]
    assert (failed.shape, failed.dtype) == ((0, 3), torch.bfloat16)
    assert scored is IMAGE


def test_a_task_that_declares_none_has_no_columns_of_them() -> None:
    check_extras(Reward(1.0), ())
    assert extra_columns([Reward(1.0)]) == {}
