"""What ranks may be divided into, told before anything starts."""

import pytest

from asyncrl.configs import load, parse_set
from asyncrl.configs.sections.trainer import Trainer
from asyncrl.engine.errors import ConfigError


def trainer(*settings: str) -> Trainer:
    return load("default", [parse_set(f"trainer.{setting}") for setting in settings]).config.trainer


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["tensor_parallel=2"], r"trainer\.tensor_parallel is 2 and trainer\.backend torch.*must be 1"),
        (["pipeline_parallel=2"], r"trainer\.pipeline_parallel is 2 and trainer\.backend torch"),
        (["expert_parallel=2"], r"trainer\.expert_parallel is 2 and trainer\.backend torch"),
        (["context_parallel=2"], r"trainer\.context_parallel is 2; .*Transformer Engine.*must be 1"),
        (["backend=megatron", "ranks=3", "tensor_parallel=2"], r"trainer\.ranks is 3, .*ranks must be a multiple"),
        (["backend=megatron", "ranks=4", "tensor_parallel=2", "pipeline_parallel=4"], r"takes 8 ranks"),
        (["backend=megatron", "ranks=6", "expert_parallel=4"], r"trainer\.expert_parallel is 4, and 6 ranks hold 6"),
        (
            ["backend=megatron", "ranks=4", "expert_parallel=2", "sft_warm_up_steps=1", "sft_warm_up_batch=3"],
            r"trainer\.sft_warm_up_batch is 3, .*there are 4 replicas",
        ),
        (["backend=megatron", "fetch_policy=leader"], r"trainer\.fetch_policy is leader; it must be auto"),
        (["tensor_parallel=0"], r"trainer\.tensor_parallel.*0"),
        (["backend=deepspeed"], r"trainer\.backend.*'deepspeed'; it must be one of torch, megatron"),
    ],
)
def test_ranks_that_do_not_divide_are_refused(settings: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        trainer(*settings)


@pytest.mark.parametrize(
    ("ranks", "tensor", "pipeline", "replicas"), [(1, 1, 1, 1), (4, 1, 1, 4), (4, 2, 1, 2), (8, 2, 2, 2), (6, 1, 3, 2)]
)
def test_replicas_are_the_quotient(ranks: int, tensor: int, pipeline: int, replicas: int) -> None:
    found = trainer("backend=megatron", f"ranks={ranks}", f"tensor_parallel={tensor}", f"pipeline_parallel={pipeline}")
    assert found.replicas == replicas


@pytest.mark.parametrize("policy", ["leader", "independent"])
def test_ranks_that_share_a_replica_may_read_as_they_are_told(policy: str) -> None:
    assert trainer("backend=megatron", "tensor_parallel=2", f"fetch_policy={policy}").fetch_policy == policy
