"""Whom a router of Megatron asks for a token's experts, without megatron."""

import torch

from asyncrl.trainers.backends.megatron.given_experts import GivenExperts

SCORES = torch.tensor([[0.1, 0.9, 0.5, 0.2], [0.7, 0.3, 0.4, 0.6]])
OWN, GIVEN = [[1, 2], [0, 3]], torch.tensor([[3, 0], [-1, -1]])
TAKEN = [[3, 0], [0, 3]]
"""GIVEN, and where it has none the router's own."""


def ask(given: GivenExperts) -> list[list[int]]:
    def largest(scores: torch.Tensor, k: int, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        return scores.topk(k, dim=1)

    scores, chosen = given.get_replay_topk(SCORES, 2, default_compute_topk=largest)
    assert torch.equal(scores, SCORES.gather(1, chosen))
    found: list[list[int]] = chosen.tolist()
    return found


def test_given_experts_are_taken_and_where_there_are_none_the_routers_own() -> None:
    given = GivenExperts(recomputes=False)
    assert ask(given) == OWN
    given.take(GIVEN)
    assert ask(given) == TAKEN
    given.take(None)
    assert ask(given) == OWN


def test_layers_that_are_computed_again_take_what_their_micro_batch_was_given() -> None:
    """Two micro-batches have begun before the first one's backward pass, as in a pipeline."""
    given = GivenExperts(recomputes=True)
    for experts, expected in ((GIVEN, TAKEN), (None, OWN)):
        given.take(experts)
        with torch.no_grad():  # As the first pass of a layer that is computed again.
            assert ask(given) == expected
    assert [ask(given), ask(given)] == [TAKEN, OWN]


def test_a_pass_without_a_backward_pass_leaves_nothing_behind() -> None:
    given = GivenExperts(recomputes=True)
    with torch.no_grad():
        given.take(None)
        assert ask(given) == OWN
    given.take(GIVEN)
    assert ask(given) == TAKEN


def test_what_an_error_has_ended_is_forgotten() -> None:
    given = GivenExperts(recomputes=True)
    given.take(None)
    given.forget()
    given.take(GIVEN)
    assert ask(given) == TAKEN
