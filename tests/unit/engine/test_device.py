"""Which device and precision the parts of a run get."""

import pytest
import torch

from asyncrl.configs import load, parse_set
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.lifecycle.parts import collector_model, rank_model
from asyncrl.engine.model.device import choose_device


def two() -> int:
    return 2


def none() -> int:
    return 0


def test_processes_take_the_gpus_in_turn_where_there_are_any() -> None:
    found = [choose_device("auto", place, count_gpus=two) for place in range(3)]
    assert found == [choose_device("cuda", place, count_gpus=two) for place in range(3)]
    assert [(device.type, device.index) for device in found] == [("cuda", 0), ("cuda", 1), ("cuda", 0)]


def test_the_cpu_is_taken_where_it_is_asked_for_or_there_is_nothing_else() -> None:
    assert choose_device("cpu", 1, count_gpus=two) == torch.device("cpu")
    assert choose_device("auto", 1, count_gpus=none) == torch.device("cpu")


def test_a_gpu_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigError, match="torch sees no GPU here; it must be auto or cpu"):
        choose_device("cuda", 0, count_gpus=none)


def test_in_bfloat16_ranks_keep_float32_weights_and_generators_do_not() -> None:
    """Frequencies of rotary positions stay as they are: rounded, they would make another model of it."""
    sets = ["model.dtype=bfloat16", "model.hidden_size=16", "trainer.device=cpu", "collector.device=cpu"]
    config = load("default", [parse_set(text) for text in sets]).config
    rank, collector = rank_model(config, 0), collector_model(config, 1)
    assert {p.dtype for p in rank.parameters()} == {torch.float32}
    assert {p.dtype for p in collector.parameters()} == {torch.bfloat16}
    buffers = dict(collector.named_buffers())
    assert buffers
    assert all(torch.equal(value, buffers[name]) for name, value in rank.named_buffers())
    for name, value in rank.named_parameters():
        assert torch.equal(value.bfloat16(), collector.get_parameter(name)), name
