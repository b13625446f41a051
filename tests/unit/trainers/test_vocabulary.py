"""Scores from parts of a vocabulary, on the one rank of a group; tests/megatron has several ranks."""

from typing import Any

import pytest
import torch

from asyncrl.trainers.backends.megatron.vocabulary import Vocabulary

SIZE, PADDED, WIDTH, TOKENS = 11, 14, 6, 7
TEMPERATURE = 0.7


@pytest.mark.parametrize("chunk", [TOKENS, 3])
def test_scores_and_gradients_are_those_of_float64_and_ranks_meet_once_per_chunk(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backward pass computes logits again, and not the sums over ranks: with a rank that waits each is a delay."""
    sums: list[Any] = []
    # The sum and the maximum over one rank are its own.
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda values, **how: sums.append((values.shape, how)))
    torch.manual_seed(0)
    matrix = torch.randn(PADDED, WIDTH)
    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
    tokens = torch.randint(SIZE, (TOKENS,))
    weights = torch.randn(TOKENS)
    part = Vocabulary(first=0, size=SIZE, group=None)  # type: ignore[arg-type]
    passes = []

    def logits_of(some: torch.Tensor) -> torch.Tensor:
        passes.append(some.shape[0])
        return some @ matrix.T

    scores = part.scores(logits_of, hidden, tokens, temperature=TEMPERATURE, chunk=chunk)
    chunks = -(-TOKENS // chunk)
    assert len(sums) == 2 * chunks
    torch.autograd.backward((scores.logprobs * weights).sum())
    assert len(sums) == 2 * chunks
    assert len(passes) == (chunks if chunks == 1 else 2 * chunks)

    exact = hidden.detach().double().requires_grad_()
    table = torch.log_softmax(exact @ matrix.double().T[:, :SIZE] / TEMPERATURE, dim=-1)
    logprobs = table.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    torch.autograd.backward((logprobs * weights.double()).sum())
    torch.testing.assert_close(scores.logprobs.double(), logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(scores.entropies.double(), -(table.exp() * table).sum(-1), rtol=0, atol=1e-5)
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad.double(), exact.grad, rtol=0, atol=1e-5)
    assert not scores.entropies.requires_grad
