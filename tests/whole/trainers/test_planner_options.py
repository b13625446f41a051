"""`trainer.align`, `balance` and `micro_batch_order` change how a batch is cut and run, and not what is learnt."""

import copy
from typing import Any

import pytest
import torch

from asyncrl.trainers.backends.base import Rows

BUDGETS = {"micro_batch_tokens": 12, "forward_tokens": 20}
STAGES = {"recompute_logprobs": True, "reference_kl": 0.1}


def shapes(model: Any) -> list[tuple[int, ...]]:
    """Keep the shape of every forward pass of a model and of its copies."""
    seen: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(lambda _, __, given: seen.append(tuple(given["input_ids"].shape)), with_kwargs=True)
    return seen


def gradient(backend: Any, samples: Any) -> torch.Tensor:
    rows = Rows(
        [torch.tensor(sample.ids) for sample in samples],
        [torch.full((len(sample.ids) - sample.prompt,), -2.0, dtype=torch.float64) for sample in samples],
        [sample.prompt for sample in samples],
        [sample.advantage for sample in samples],
        [0] * len(samples),
        filler=False,
    )
    backend.accumulate(rows, 10)
    flat: torch.Tensor = backend.gradients()
    return flat


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("align", [3, 8])
def test_alignment_lengthens_rows_and_leaves_the_gradient(
    small_llama: Any, varied: Any, make_backend: Any, packed: bool, align: int
) -> None:
    """1e-12 in float64; in a packed row each sample takes a multiple, so a row is as long as all of them."""
    plain = gradient(make_backend(copy.deepcopy(small_llama)), varied)
    model = copy.deepcopy(small_llama)
    seen = shapes(model)
    found = gradient(make_backend(model, packed=packed, align=align), varied)
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-12)
    assert float(plain.norm()) > 1e-2
    lengths = [-(-len(sample.ids) // align) * align for sample in varied]
    assert seen == [(1, sum(lengths)) if packed else (len(varied), max(lengths))]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"align": 4},
        {"align": 4, "packed": True, "pad_to_step_length": True},
        {"balance": False},
        {"micro_batch_order": "cheap_ends"},
    ],
    ids="-".join,
)
def test_a_step_under_an_option_is_the_step_without(
    small_llama: Any, varied: Any, run_batch: Any, ranks: int, options: dict[str, Any]
) -> None:
    """All stages, whole batches: loss and gradient norm to 1e-12 in float64; weights as AdamW's division lets them."""
    plain = run_batch(small_llama, varied, drift=0.02, ranks=ranks, **STAGES, **BUDGETS)
    found = run_batch(small_llama, varied, drift=0.02, ranks=ranks, **STAGES, **{**BUDGETS, **options})
    assert found.plan != plain.plan
    assert sum(r.loss for r in found.results) == pytest.approx(sum(r.loss for r in plain.results), abs=1e-12)
    assert found.results[0].grad_norm == pytest.approx(plain.results[0].grad_norm, abs=1e-12)
    for mine, other in zip(found.weights, plain.weights, strict=True):
        for name in mine:
            torch.testing.assert_close(mine[name], other[name], rtol=0, atol=1e-9)


def test_without_balancing_every_stage_keeps_the_order_of_the_batch(
    causal_mean: Any, varied: Any, run_batch: Any
) -> None:
    """D16: the flag is heeded by training and by forward-only stages; with it, both reorder."""
    for balance in (False, True):
        found = run_batch(causal_mean, varied, balance=balance, recompute_logprobs=True, **BUDGETS)
        trained = [key for rank in found.plan.ranks for micro in rank if not micro.filler for key in micro.keys]
        measured = [key for rank in found.forward for micro in rank for key in micro.keys]
        assert (trained == list(found.samples)) is not balance
        assert (measured == list(found.samples)) is not balance
        assert sorted(trained) == sorted(found.samples)


def test_cheap_micro_batches_stand_at_both_ends_where_that_is_asked_for(
    causal_mean: Any, varied: Any, run_batch: Any
) -> None:
    first = run_batch(causal_mean, varied, **BUDGETS).plan.ranks[0]
    ends = run_batch(causal_mean, varied, micro_batch_order="cheap_ends", **BUDGETS).plan.ranks[0]
    costs = [micro.cost for micro in first]
    assert costs == sorted(costs, reverse=True)
    assert [micro.cost for micro in ends] == [*costs[::2][::-1], *costs[1::2]] != costs


def test_alignment_leaves_room_for_whole_multiples_in_every_micro_batch(
    causal_mean: Any, varied: Any, run_batch: Any
) -> None:
    """A budget of 12 in multiples of 4, in training and in forward-only stages."""
    found = run_batch(causal_mean, varied, align=4, recompute_logprobs=True, **BUDGETS)
    lengths = {key: -(-len(sample.ids) // 4) * 4 for key, sample in found.samples.items()}
    for budget, ranks in ((12, found.plan.ranks), (20, found.forward)):
        loads = [sum(lengths[key] for key in micro.keys) for rank in ranks for micro in rank]
        assert max(loads) <= budget


@pytest.mark.parametrize("packed", [False, True])
def test_the_one_length_of_a_step_is_a_multiple_as_well(
    small_llama: Any, varied: Any, run_batch: Any, packed: bool
) -> None:
    """And no row is longer, though each sample is lengthened."""
    model = copy.deepcopy(small_llama)
    seen = shapes(model)
    run_batch(model, varied, ranks=2, packed=packed, align=4, pad_to_step_length=True, **BUDGETS)
    # The first passes are the behaviour's, sample by sample.
    assert {shape[1] for shape in seen[len(varied) :]} == {12}
