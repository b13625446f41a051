"""What the native engine refuses: a request that it cannot serve, and a model that it cannot decode."""

from collections.abc import Sequence
from typing import Any

import torch

from asyncrl.collectors.engines.base import Request, Sampling
from asyncrl.collectors.engines.decoder import Decoder
from asyncrl.collectors.engines.expert_record import Experts, with_missing
from asyncrl.collectors.engines.rows import MAX_STOP_IDS, Seat
from asyncrl.collectors.engines.settings import NativeSettings
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.model.causal_lm import rounding_limit, token_logprobs
from asyncrl.engine.model.routers import Replay, has_routers
from asyncrl.engine.model.sketch import WINDOW, layer_kinds, vocabulary

_PROMPTS = (3, WINDOW + 3)
_NEW_TOKENS = WINDOW + 2


def fault(request: Request, *, length: int, vocabulary_size: int, has_text: bool) -> str | None:
    """Say why an engine of `length` tokens per sequence cannot serve a request; None if it can."""
    sampling, prompt = request.sampling, request.prompt_ids
    needed = len(prompt) + sampling.max_new_tokens
    if not prompt:
        return "the prompt has no tokens; generation needs at least one"
    # On a GPU an unknown token ends the whole process's use of the device.
    tokens = (*prompt, *(request.done.token_ids if request.done else ()))
    if not 0 <= min(tokens) <= max(tokens) < vocabulary_size:
        strange = min(tokens) if min(tokens) < 0 else max(tokens)
        return f"token {strange} is not one of the model's {vocabulary_size}"
    if sampling.max_new_tokens < 1:
        return f"max_new_tokens is {sampling.max_new_tokens}; it must be at least 1"
    if needed > length:
        return (
            f"a prompt of {len(prompt)} tokens and {sampling.max_new_tokens} new ones need {needed} positions; the "
            f"engine has {length}"
        )
    return _sampling_fault(sampling, request.seed, has_text=has_text)


def _sampling_fault(sampling: Sampling, seed: int, *, has_text: bool) -> str | None:
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0 or not 0 <= sampling.min_p <= 1:
        return (
            f"temperature {sampling.temperature}, top_p {sampling.top_p}, top_k {sampling.top_k} and min_p "
            f"{sampling.min_p} must be at least 0, in (0, 1], at least 0 and in [0, 1]"
        )
    if seed < 0:
        return f"the seed is {seed}; it must be at least 0"
    if len(sampling.stop_ids) > MAX_STOP_IDS:
        return f"{len(sampling.stop_ids)} stop ids; the engine takes {MAX_STOP_IDS}"
    if sampling.stop_strings and not has_text:
        return "stop strings need an engine that has the model's tokenizer"
    return None


def check_decoding(model: Any) -> None:
    """Decode two prompts of different lengths together; ConfigError if a log-probability is not the model's own.

    The model's own is that of one pass over the whole sequence, as transformers computes it. In float32 the largest
    difference may be 0.001; in less precise types, whose rounding alone makes more, the mean may be 0.2. The experts of
    a mixture are those that decoding chose: two that are nearly tied change places by rounding.
    """
    name = f"{getattr(model.config, 'model_type', '')} ({type(model).__name__}, layers: {layer_kinds(model)})"
    random = torch.Generator().manual_seed(0)
    prompts = [torch.randint(vocabulary(model), (length,), generator=random).tolist() for length in _PROMPTS]
    dtype = next(model.parameters()).dtype
    own = getattr(model.config, "_attn_implementation", None)
    try:
        sequences, decoded, experts = _decode(model, prompts)
        gaps = [
            (_whole(model, sequence, len(prompt), chosen) - torch.tensor(logprobs)).abs()
            for sequence, prompt, logprobs, chosen in zip(sequences, prompts, decoded, experts, strict=True)
        ]
    except ConfigError:
        raise
    except Exception as error:  # The model's own code, given a cache as it was not written for.
        raise ConfigError(f"the native engine cannot run {name}: decoding in slots fails with {error!r}") from error
    finally:
        # Whoever else has the model, or falls back to another way to decode, must find its own attention.
        if own is not None:
            model.set_attn_implementation(own)
    precise = dtype in (torch.float32, torch.float64)
    gap = max(float(found.max() if precise else found.mean()) for found in gaps)
    if not gap <= rounding_limit(dtype):
        raise ConfigError(
            f"the native engine cannot run {name}: what it decodes in slots has log-probabilities {gap:.2g} off from "
            "those of the whole sequence"
        )


def _decode(
    model: Any, prompts: list[list[int]]
) -> tuple[list[list[int]], list[list[float]], Sequence[Experts | None]]:
    length, routed = max(_PROMPTS) + _NEW_TOKENS, has_routers(model)
    settings = NativeSettings(rows=len(prompts), length=length, cache_bytes=2**62, graphs=False, experts=routed)
    decoder = Decoder(model, settings)
    decoder.fill(range(len(prompts)), [prompt[:-1] for prompt in prompts])
    sampling = Sampling(_NEW_TOKENS)
    decoder.seat([Seat(i, prompt[-1], len(prompt) - 1, 0, sampling, i) for i, prompt in enumerate(prompts)])
    tokens, logprobs = decoder.burst(len(prompts), length, steps=_NEW_TOKENS, filtered=False).read()
    sequences = [[*prompt, *made] for prompt, made in zip(prompts, tokens, strict=True)]
    experts = [decoder.experts(slot, len(sequence) - 1) for slot, sequence in enumerate(sequences)]
    decoder.close()
    return sequences, logprobs, experts


@torch.inference_mode()
def _whole(model: Any, sequence: list[int], prompt_tokens: int, experts: Experts | None) -> torch.Tensor:
    """Return log-probabilities of a sequence's tokens behind its prompt, in one pass, by the model's own attention."""
    ours = model.config._attn_implementation
    model.set_attn_implementation("eager")
    replay = None if experts is None else Replay(model)
    try:
        if replay is not None and experts is not None:
            given = torch.from_numpy(with_missing(experts, len(sequence))).long()
            replay.take(given.to(next(model.parameters()).device))
        ids = torch.tensor([sequence], device=next(model.parameters()).device)
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
    finally:
        if replay is not None:
            replay.close()
        model.set_attn_implementation(ours)
    return token_logprobs(logits[prompt_tokens - 1 : -1], ids[0, prompt_tokens:], 1.0).cpu()
