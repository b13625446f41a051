"""A model that is cut into the one part of the only rank: what its layers are between passes."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore  # Where torch's own types find it.
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from asyncrl.engine.errors import ConfigError
from asyncrl.engine.testing.conformance.sharded_rank import tiny_model
from asyncrl.trainers.backends.base import Rows
from asyncrl.trainers.backends.compiled import compile_layers
from asyncrl.trainers.backends.next_tokens import NextTokens
from asyncrl.trainers.backends.sharded import Shards
from asyncrl.trainers.backends.torch_backend import TorchBackend
from asyncrl.trainers.backends.torch_settings import TorchSettings
from asyncrl.trainers.loss.objective import Clip

SETTINGS = TorchSettings(1.0, Clip(low=0.2, high=0.3, dual=3.0), (0.9, 0.95), 0.1, 1.0, share_prompts=False)
ROWS = Rows([torch.tensor([1, 2, 3, 4])], [torch.full((3,), -2.0)], [1], [1.0], [0], filler=False)


@pytest.fixture
def one_shard() -> Iterator[Shards]:
    """The shards of a group of one rank, which is this process."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield Shards(torch.device("cpu"), ranks=1)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("reshard", "stays"), [(True, False), (False, True), (None, False)])
def test_layers_stay_whole_from_the_first_micro_batch_to_the_last(
    one_shard: Shards, reshard: bool | None, stays: bool
) -> None:
    """Else each is gathered twice per micro-batch. A CPU has no room for it of itself."""
    model = tiny_model(torch.float32, tied=False)
    backend = TorchBackend(model, replace(SETTINGS, reshard=reshard), pad_id=0, shards=one_shard)

    def whole() -> set[bool]:
        return {not isinstance(weight, DTensor) for weight in model.parameters()}

    for _ in range(2):
        for last in (False, False, True):
            backend.accumulate(replace(ROWS, last=last), 9)
            assert whole() == {stays and not last}
        backend.apply(backend.gradients(), learning_rate=0.1)
    backend.logprobs(ROWS)
    assert whole() == {stays}


def test_kernels_of_sharded_layers_know_the_size_of_a_head(one_shard: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    """They know as much as those of a whole model: all but how many rows there are, and of which length."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=keep))
    model = tiny_model(torch.float32, tied=False)
    compile_layers(model)
    tokens = one_shard.split(model, NextTokens(model, temperature=1.0, lean=True, chunk=None, fused=False))
    with torch.no_grad():
        tokens.scores(torch.ones((3, 7), dtype=torch.int64), torch.tensor([4]), torch.tensor([1]), {})
    assert graphs
    for graph in graphs:
        given = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        assert sum(isinstance(value, torch.SymInt) for value in given) == 2


def test_a_state_has_the_parts_while_layers_are_whole(one_shard: Shards) -> None:
    """A batch may end after the forward-only stages; what a checkpoint then kept would not be what is trained."""
    backend = TorchBackend(
        tiny_model(torch.float32, tied=False), replace(SETTINGS, reshard=False), pad_id=0, shards=one_shard
    )
    before = backend.training_state()
    backend.logprobs(ROWS)
    after = backend.training_state()
    assert after.places == before.places
    assert {name: tensor.data_ptr() for name, tensor in after.saved.items()} == {
        name: tensor.data_ptr() for name, tensor in before.saved.items()
    }


@pytest.mark.parametrize(("experts", "refused"), [(True, True), (False, False)])
def test_a_mixture_needs_a_torch_that_does_not_wait_for_unused_experts(
    monkeypatch: pytest.MonkeyPatch, one_shard: Shards, experts: bool, refused: bool
) -> None:
    """Before, a rank whose tokens chose fewer experts left the others waiting; other models have no such weights."""
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params", raising=False)
    model = tiny_model(torch.float32, tied=False, experts=experts)
    if refused:
        with pytest.raises(ConfigError, match=r"sharding of a mixture of experts needs a torch after"):
            TorchBackend(model, SETTINGS, pad_id=0, shards=one_shard)
    else:
        TorchBackend(model, SETTINGS, pad_id=0, shards=one_shard)
