"""The sampler takes tokens as likely as they are, and tells the log-probability of what it sampled from."""

import numpy as np
import pytest
import torch

from asyncrl.collectors.engines.sampler import keep, sample, uniform

SHARES = torch.tensor([0.4, 0.3, 0.2, 0.1])


def kept_of(shares: torch.Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[bool]:
    one = torch.ones(1)
    kept = keep(shares.log()[None], one, torch.tensor([top_k]), one * top_p, one * min_p)
    return kept[0].tolist()


def test_tokens_come_as_often_as_they_are_likely() -> None:
    draws = torch.from_numpy(uniform(7, 20_000))
    tokens, logprobs = sample(SHARES.log().expand(len(draws), -1), draws, torch.ones(len(draws)))
    assert torch.allclose(torch.bincount(tokens) / len(draws), SHARES, atol=0.01)
    assert torch.allclose(logprobs, SHARES.log()[tokens], atol=1e-6)


def test_a_temperature_sharpens_the_distribution_whose_logprobs_are_told() -> None:
    draws = torch.from_numpy(uniform(7, 20_000))
    tokens, logprobs = sample(SHARES.log().expand(len(draws), -1), draws, torch.full((len(draws),), 0.5))
    sharper = SHARES**2 / (SHARES**2).sum()
    assert torch.allclose(torch.bincount(tokens) / len(draws), sharper, atol=0.01)
    assert torch.allclose(logprobs, sharper.log()[tokens], atol=1e-6)


@pytest.mark.parametrize("draw", [0.0, 0.5, 1 - 2**-24])
def test_a_token_that_cannot_come_does_not_at_the_ends_either(draw: float) -> None:
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf, 2.0, -torch.inf]])
    token, logprob = sample(logits, torch.tensor([draw]), torch.ones(1))
    assert int(token) in (1, 3)
    assert torch.isfinite(logprob).all()


def test_outputs_that_are_not_finite_are_told_as_such() -> None:
    _, logprobs = sample(torch.full((1, 4), torch.nan), torch.tensor([0.5]), torch.ones(1))
    assert torch.isnan(logprobs).all()


def test_filters_leave_the_likeliest() -> None:
    assert kept_of(SHARES, top_k=2) == [True, True, False, False]
    assert kept_of(SHARES, top_p=0.5) == [True, True, False, False]
    assert kept_of(SHARES, top_p=0.1) == [True, False, False, False]
    assert kept_of(SHARES, min_p=0.4) == [True, True, True, False]
    assert kept_of(SHARES, top_k=3, top_p=0.8, min_p=0.6) == [True, True, False, False]
    assert kept_of(SHARES) == [True] * 4


def test_top_k_keeps_no_more_when_shares_are_equal() -> None:
    assert sum(kept_of(torch.full((6,), 1 / 6), top_k=2)) == 2


def test_a_row_without_filters_samples_the_same_beside_one_with() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    draws, ones = torch.tensor([0.3, 0.3]), torch.ones(2)
    kept = keep(logits, ones, torch.tensor([0, 5]), ones, torch.zeros(2))
    with_filter, plain = sample(logits, draws, ones, kept), sample(logits, draws, ones)
    assert (with_filter[0][0], with_filter[1][0]) == (plain[0][0], plain[1][0])


def test_draws_are_a_function_of_seed_and_place() -> None:
    assert np.array_equal(uniform(3, 10)[:4], uniform(3, 4))
    assert not np.array_equal(uniform(3, 4), uniform(4, 4))
    assert uniform(3, 100_000).max() < 1
