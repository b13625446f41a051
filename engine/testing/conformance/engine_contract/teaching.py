"""Log-probabilities are those of one pass over the whole sequence, under the weights of their span."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from asyncrl.collectors.engines.base import Request, Result, Sampling
from asyncrl.engine.testing.conformance.engine_contract.trial import Teacher, Trial, check_near, reading


def model_teacher(model_of: Callable[[int], Any]) -> Teacher:
    """Return the teacher of transformers models: `model_of(version)` is one, in float32, with a version's weights."""

    @torch.inference_mode()
    def teach(version: int, prompt: Sequence[int], tokens: Sequence[int], sampling: Sampling) -> list[float]:
        model = model_of(version)
        ids = torch.tensor([[*prompt, *tokens]])
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
        rows = logits[len(prompt) - 1 : -1].double()
        return [
            _filtered(torch.softmax(row / sampling.temperature, -1).tolist(), token, sampling)
            for row, token in zip(rows, tokens, strict=True)
        ]

    return teach


def _filtered(shares: list[float], token: int, sampling: Sampling) -> float:
    """Return a token's log-probability in what top-k, top-p and min-p leave of a distribution."""
    likeliest = sorted(range(len(shares)), key=lambda t: -shares[t])
    left = likeliest[: sampling.top_k or None]
    total, kept = sum(shares[t] for t in left), []
    reached = 0.0
    for t in left:
        if reached >= sampling.top_p * total:
            break
        kept.append(t)
        reached += shares[t]
    kept = [t for t in kept if shares[t] >= sampling.min_p * shares[kept[0]]]
    assert token in kept, f"token {token} is not among {kept}"
    return float(torch.tensor(shares[token] / sum(shares[t] for t in kept)).log())


async def logprobs_are_the_teachers_before_and_after_an_update(trial: Trial) -> None:
    for _ in range(2):
        version = (await trial.engine.stats()).version
        for request in (trial.request(8), trial.request(8, group="shared"), trial.request(8, group="shared")):
            result = await trial.run(request)
            check_near(result.logprobs, _taught(trial, version, request, result))
        await trial.update()


async def logprobs_are_of_the_distribution_that_was_sampled(trial: Trial) -> None:
    """CASE-G4: at any temperature, and under each filter."""
    version = (await trial.engine.stats()).version
    for sampling in ({"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}):
        request = trial.request(8, **sampling)
        result = await trial.run(request)
        check_near(result.logprobs, _taught(trial, version, request, result))


async def a_partial_that_goes_on_has_the_logprobs_of_each_versions_own(trial: Trial) -> None:
    async with reading(trial, trial.long_request(), trial.long_request()) as streams:
        await trial.engine.abort()
    new = await trial.update()
    for stream in streams:
        request, partial = stream.request, stream.results[0]
        result = await trial.run(replace(request, id=f"{request.id} goes on", done=partial))
        (old, _, end), (again, _, _) = result.spans
        assert (again, end) == (new, len(partial.token_ids))
        check_near(result.logprobs[:end], _taught(trial, old, request, result)[:end])
        check_near(result.logprobs[end:], _taught(trial, new, request, result)[end:])


async def with_the_cache_recomputed_new_tokens_are_the_new_versions_own(trial: Trial) -> None:
    async with reading(trial, trial.long_request(), trial.long_request()) as streams:
        await trial.update(cache="recompute")
    for stream in streams:
        result = stream.results[0]
        (old, _, end), (new, _, _) = result.spans
        check_near(result.logprobs[:end], _taught(trial, old, stream.request, result)[:end])
        check_near(result.logprobs[end:], _taught(trial, new, stream.request, result)[end:])


async def with_the_cache_kept_who_begins_afterwards_sees_nothing_of_the_old(trial: Trial) -> None:
    async with reading(trial, trial.long_request(group="kept")) as (stream,):
        new = await trial.update(cache="keep")
        request = trial.request(8, group="kept")
        result = await trial.run(request)
        check_near(result.logprobs, _taught(trial, new, request, result))
    (old, _, end), _ = stream.results[0].spans
    taught = _taught(trial, old, stream.request, stream.results[0])
    check_near(stream.results[0].logprobs[:end], taught[:end])


def _taught(trial: Trial, version: int, request: Request, result: Result) -> list[float]:
    assert trial.teacher is not None
    return list(trial.teacher(version, request.prompt_ids, result.token_ids, request.sampling))


TEACHING = (
    logprobs_are_the_teachers_before_and_after_an_update,
    logprobs_are_of_the_distribution_that_was_sampled,
    a_partial_that_goes_on_has_the_logprobs_of_each_versions_own,
    with_the_cache_recomputed_new_tokens_are_the_new_versions_own,
    with_the_cache_kept_who_begins_afterwards_sees_nothing_of_the_old,
)
