"""The policy loss against a plain per-token loop, at the bounds of its numbers, and its gradient."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.trainers.loss.objective import Clip, Proximal, Reference, policy_loss_sums

CLIP = Clip(low=0.2, high=0.28, dual=3.0)
PerToken = Callable[[float, float, float, Clip], tuple[float, float, bool, float]]
gaps = st.floats(-200, 200)
advantages = st.floats(-5, 5)


def rows(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def test_sums_equal_a_plain_loop_over_tokens(per_token: PerToken) -> None:
    """All regions of the clip, low and high unequal, both signs, and the dual clip."""
    cells = [(g, a) for g in (-3.0, -0.3, -0.1, 0.0, 0.1, 0.26, 0.5, 1.5, 25.0, -25.0) for a in (-2.0, -0.5, 0.0, 1.3)]
    logprob = rows(*(g - 1.5 for g, _ in cells))
    behaviour = torch.full_like(logprob, -1.5)
    advantage = rows(*(a for _, a in cells))
    mask = torch.tensor([i % 7 != 3 for i in range(len(cells))])
    sums = policy_loss_sums(logprob, behaviour, advantage, mask, CLIP)
    parts = [per_token(g - 1.5, -1.5, a, CLIP) for (g, a), keep in zip(cells, mask.tolist(), strict=True) if keep]
    assert float(sums.loss) == pytest.approx(sum(p[0] for p in parts), rel=1e-12)
    assert float(sums.ratio) == pytest.approx(sum(p[1] for p in parts), rel=1e-12)
    assert int(sums.clipped) == sum(p[2] for p in parts)
    assert float(sums.kl) == pytest.approx(sum(p[3] for p in parts), rel=1e-12)
    assert int(sums.tokens) == len(parts)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [
        (1.1, 1.0, -1.1),
        (1.5, 1.0, -1.28),
        (0.5, 1.0, -0.5),
        (0.5, -1.0, 0.8),
        (1.5, -1.0, 1.5),
        (9.0, -1.0, 3.0),
        (9.0, -0.5, 1.5),
    ],
)
def test_each_region_of_the_clip_has_its_closed_form(ratio: float, advantage: float, loss: float) -> None:
    sums = policy_loss_sums(rows(math.log(ratio)), rows(0.0), rows(advantage), torch.tensor([True]), CLIP)
    assert float(sums.loss) == pytest.approx(loss, rel=1e-12)


def test_the_ratio_is_to_the_behaviour_policy() -> None:
    """CASE-G6: sampler -2, trainer -1 on every token: the ratio is e, and the KL estimate is not zero."""
    shape = torch.zeros(4, dtype=torch.float64)
    sums = policy_loss_sums(shape - 1, shape - 2, shape + 1, torch.ones(4, dtype=torch.bool), CLIP)
    assert float(sums.ratio) / 4 == pytest.approx(math.e, rel=1e-12)
    assert float(sums.kl) / 4 == pytest.approx(math.e - 2, rel=1e-12)
    assert int(sums.clipped) == 4


@pytest.mark.parametrize("clip_high", [0.28, 1e6])
@pytest.mark.parametrize("decoupled", [False, True])
def test_a_stale_token_is_weighted_by_its_ratio_to_the_sampler_in_either_loss(
    decoupled: bool, clip_high: float
) -> None:
    """CASE-J7: no option trains older tokens as if they were on policy; a wide clip leaves the correction alone."""
    behaviour = rows(-1.0, -1.0)
    logprob = (behaviour + 0.2).requires_grad_()
    advantage = rows(1.5, -0.5)
    proximal = Proximal(logprob.detach(), cap=10.0) if decoupled else None
    mask = torch.ones(2, dtype=torch.bool)
    sums = policy_loss_sums(logprob, behaviour, advantage, mask, Clip(0.2, clip_high, 3.0), proximal=proximal)
    sums.loss.backward()  # type: ignore[no-untyped-call]
    assert torch.allclose(logprob.grad, -advantage * math.exp(0.2))  # type: ignore[arg-type]


def test_on_policy_the_ratio_is_one_and_the_gradient_is_minus_the_advantage() -> None:
    logprob = rows(-0.3, -2.0, -7.0).requires_grad_()
    advantage = rows(1.5, -0.5, 0.0)
    sums = policy_loss_sums(logprob, logprob.detach(), advantage, torch.ones(3, dtype=torch.bool), CLIP)
    sums.loss.backward()  # type: ignore[no-untyped-call]
    assert (float(sums.ratio), int(sums.clipped), float(sums.kl)) == (3.0, 0, 0.0)
    assert torch.equal(logprob.grad, -advantage)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [99.0, -99.0, math.inf, -math.inf, math.nan])
def test_a_masked_token_adds_exactly_nothing(bad: float, dtype: torch.dtype) -> None:
    """CASE-G1: trainer -1 against sampler -100 and the other way round, infinities and NaN, masked."""
    logprob = rows(-1.0, bad - 1, dtype=dtype).requires_grad_()
    behaviour = rows(-1.1, -1.0, dtype=dtype)
    mask = torch.tensor([True, False])
    sums = policy_loss_sums(logprob, behaviour, rows(-1.0, -1.0, dtype=dtype), mask, CLIP)
    alone = policy_loss_sums(logprob[:1], behaviour[:1], rows(-1.0, dtype=dtype), mask[:1], CLIP)
    sums.loss.backward()  # type: ignore[no-untyped-call]
    for name in ("loss", "ratio", "clipped", "kl", "tokens"):
        assert torch.equal(getattr(sums, name), getattr(alone, name))
    assert logprob.grad is not None
    assert logprob.grad[1] == 0
    assert torch.isfinite(logprob.grad).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_unmasked_token_weighs_at_most_the_cap(dtype: torch.dtype) -> None:
    """CASE-G1: a difference of 99, unmasked, with a cap of 5; then -99, which underflows to nothing."""
    clip = Clip(0.2, 0.2, 5.0)
    one = torch.tensor([True])
    for behaviour, advantage, loss in ((-100.0, -1.0, 5.0), (-100.0, 1.0, -1.2), (98.0, 1.0, 0.0), (98.0, -1.0, 0.8)):
        logprob = rows(-1.0, dtype=dtype).requires_grad_()
        sums = policy_loss_sums(logprob, rows(behaviour, dtype=dtype), rows(advantage, dtype=dtype), one, clip)
        sums.loss.backward()  # type: ignore[no-untyped-call]
        assert float(sums.loss.detach()) == pytest.approx(loss, abs=1e-6)
        assert math.isfinite(float(sums.kl))
        assert math.isfinite(float(sums.ratio))
        assert logprob.grad is not None
        assert float(logprob.grad) == pytest.approx(0.0, abs=1e-6)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(gaps, advantages, st.booleans()), min_size=1, max_size=12))
def test_no_gap_makes_a_loss_a_gradient_or_a_metric_infinite(cells: list[tuple[float, float, bool]]) -> None:
    """Invariant 10, in float32, with any gap in [-200, 200]."""
    logprob = rows(*(gap / 2 for gap, _, _ in cells), dtype=torch.float32).requires_grad_()
    sums = policy_loss_sums(
        logprob,
        -logprob.detach(),
        rows(*(advantage for _, advantage, _ in cells), dtype=torch.float32),
        torch.tensor([keep for _, _, keep in cells]),
        CLIP,
    )
    sums.loss.backward()  # type: ignore[no-untyped-call]
    assert logprob.grad is not None
    assert torch.isfinite(logprob.grad).all()
    assert all(math.isfinite(float(value.detach())) for value in (sums.loss, sums.ratio, sums.kl))
    bound = sum(max(CLIP.dual, 1 + CLIP.high) * abs(advantage) for _, advantage, keep in cells if keep)
    assert abs(float(sums.loss.detach())) <= bound * (1 + 1e-5) + 1e-6


@pytest.mark.parametrize("infinite", ["trainer", "sampler"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_infinite_log_probability_that_counts_stays_finite(infinite: str, advantage: float) -> None:
    logprob = rows(-math.inf if infinite == "trainer" else -1.0).requires_grad_()
    behaviour = rows(-math.inf if infinite == "sampler" else -1.0)
    sums = policy_loss_sums(logprob, behaviour, rows(advantage), torch.tensor([True]), CLIP)
    sums.loss.backward()  # type: ignore[no-untyped-call]
    assert math.isfinite(float(sums.loss.detach()))
    assert logprob.grad is not None
    assert torch.isfinite(logprob.grad).all()


def test_the_gradient_is_the_derivative_of_the_loss() -> None:
    """In every region, away from its edges; beyond the bound of the exponent it is zero."""
    gap = rows(-2.0, -0.4, -0.1, 0.1, 0.4, 0.9, 2.0).repeat(2)
    advantage = torch.cat([torch.full((7,), 1.5), torch.full((7,), -0.7)]).double()
    mask = torch.tensor([True] * 13 + [False])
    behaviour = torch.full_like(gap, -2)

    def loss(logprob: torch.Tensor) -> torch.Tensor:
        return policy_loss_sums(logprob, behaviour, advantage, mask, CLIP).loss

    assert torch.autograd.gradcheck(loss, ((gap - 2).requires_grad_(),), eps=1e-6, atol=1e-8)


def test_importance_weights_are_reported_as_they_are_and_as_truncated() -> None:
    """CASE-G3: raw weights [0.6, 12.0, 0.8] and a cap of 2: mean 4.467, 1.133 as used, a third truncated."""
    behaviour = rows(-1.0, -3.0, -2.0)
    proximal = behaviour + rows(math.log(0.6), math.log(12.0), math.log(0.8))
    mask = torch.ones(3, dtype=torch.bool)
    sums = policy_loss_sums(proximal, behaviour, rows(1, 1, 1), mask, CLIP, proximal=Proximal(proximal, cap=2.0))
    assert float(sums.weight) / 3 == pytest.approx(4.467, abs=1e-3)
    assert float(sums.used_weight) / 3 == pytest.approx(1.133, abs=1e-3)
    assert int(sums.truncated) == 1
    assert float(sums.loss) == pytest.approx(-(0.6 + 2.0 + 0.8), rel=1e-12)


@pytest.mark.parametrize("advantage", [1.3, -0.7])
def test_the_decoupled_ratio_is_to_the_proximal_policy(advantage: float) -> None:
    """π / π_proximal is 1.1, inside the clip, and π / π_sampler far outside: weight 2 of 3.3 / 1.1, no clip."""
    behaviour, proximal = rows(-2.0), rows(-2.0 + math.log(3.0))
    logprob = (proximal + math.log(1.1)).requires_grad_()
    mask = torch.tensor([True])
    sums = policy_loss_sums(logprob, behaviour, rows(advantage), mask, CLIP, proximal=Proximal(proximal, cap=2.0))
    sums.loss.backward()  # type: ignore[no-untyped-call]
    assert float(sums.ratio) == pytest.approx(1.1, rel=1e-12)
    assert int(sums.clipped) == 0
    assert float(sums.loss.detach()) == pytest.approx(-2.0 * 1.1 * advantage, rel=1e-12)
    assert logprob.grad is not None
    assert float(logprob.grad) == pytest.approx(-2.0 * 1.1 * advantage, rel=1e-12)
    assert float(sums.kl) == pytest.approx(3.3 - 1 - math.log(3.3), rel=1e-12)


@pytest.mark.parametrize("gap", [-3.0, -0.2, 0.0, 0.4, 2.0])
def test_the_reference_term_is_k3_times_coefficient_and_scale(gap: float) -> None:
    """Loss β s (r - 1 - log r) and derivative β s (1 - r), for r = π_reference / π."""
    logprob = rows(-1.5, -1.5).requires_grad_()
    reference = Reference(rows(gap - 1.5, 7.0), scales=rows(0.5, 9.0), coefficient=0.3)
    mask = torch.tensor([True, False])
    sums = policy_loss_sums(logprob, rows(-1.5, -1.5), rows(0.0, 1.0), mask, CLIP, reference=reference)
    sums.loss.backward()  # type: ignore[no-untyped-call]
    assert float(sums.loss.detach()) == pytest.approx(0.15 * (math.exp(gap) - 1 - gap), abs=1e-12)
    assert float(sums.reference_kl) == pytest.approx(math.exp(gap) - 1 - gap, abs=1e-12)
    assert logprob.grad is not None
    assert logprob.grad.tolist() == pytest.approx([0.15 * (1 - math.exp(gap)), 0.0], abs=1e-12)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 99.0, -99.0])
def test_a_masked_token_adds_nothing_to_weights_nor_the_reference_term(bad: float) -> None:
    """CASE-G1, also for what the ranks compute."""
    logprob = rows(-1.0, -1.0).requires_grad_()
    mask = torch.tensor([True, False])
    far = rows(-1.2, bad)
    extras = {"proximal": Proximal(far, 2.0), "reference": Reference(far, rows(1.0, 1.0), 0.5)}
    sums = policy_loss_sums(logprob, rows(-1.1, -1.0), rows(1.0, 1.0), mask, CLIP, **extras)  # type: ignore[arg-type]
    sums.loss.backward()  # type: ignore[no-untyped-call]
    assert logprob.grad is not None
    assert logprob.grad[1] == 0
    for name in ("loss", "weight", "used_weight", "reference_kl"):
        assert math.isfinite(float(getattr(sums, name).detach()))
    assert float(sums.weight) == pytest.approx(math.exp(-0.1), rel=1e-12)


def test_without_a_proximal_policy_and_a_reference_their_sums_are_zero() -> None:
    sums = policy_loss_sums(rows(-1.0), rows(-2.0), rows(1.0), torch.tensor([True]), CLIP)
    assert [float(sums.weight), float(sums.used_weight), int(sums.truncated), float(sums.reference_kl)] == [0] * 4
