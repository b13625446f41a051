"""Decoding with a cache says what the whole sequence says: tried on two short prompts before a run.

A model that keeps its state otherwise than attention does takes another cache, or pads otherwise; it
decodes on all the same, from another distribution than the trainer computes.
"""

from typing import Any

import torch

from asyncrl.collectors.generators.base import GroupRequest
from asyncrl.collectors.generators.torch_generator import TorchGenerator
from asyncrl.engine.aio.blocking import in_place
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.model.causal_lm import rounding_limit, token_logprobs
from asyncrl.engine.model.sketch import WINDOW, layer_kinds, vocabulary

NEW_TOKENS = WINDOW + 2
_NO_TOKEN = -1


def check_cached(model: Any, *, pad_id: int) -> None:
    """Decode two prompts of different lengths together; ConfigError if a token's log-probability is not the model's."""
    random = torch.Generator().manual_seed(0)
    prompts = [torch.randint(vocabulary(model), (length,), generator=random).tolist() for length in (3, WINDOW + 3)]
    generator = TorchGenerator(
        model, eos_id=_NO_TOKEN, pad_id=pad_id, decode_samples=len(prompts), alone=False, blocking=in_place
    )
    requests = [GroupRequest(tuple(prompt), (seed,), NEW_TOKENS, 1.0) for seed, prompt in enumerate(prompts)]
    name = f"{type(model).__name__} (its layers: {layer_kinds(model)})"
    try:
        completions = [group[0] for group in generator.decode(requests)]
        gap = max(
            _gap(model, prompt, completion.token_ids, completion.logprobs)
            for prompt, completion in zip(prompts, completions, strict=True)
        )
    except Exception as error:  # The model's own code, given a cache as it was not written for.
        raise ConfigError(f"{name} cannot decode with a key-value cache, so it cannot be trained: {error!r}") from error
    if not gap <= rounding_limit(next(model.parameters()).dtype):
        raise ConfigError(
            f"{name} gives tokens that it decodes with a key-value cache log-probabilities {gap:.2g} off on average "
            "from those of the whole sequence, so it cannot be trained: sampled and trained policy would differ"
        )


@torch.inference_mode()
def _gap(model: Any, prompt: list[int], tokens: tuple[int, ...], logprobs: tuple[float, ...]) -> float:
    ids = torch.tensor([[*prompt, *tokens]], device=next(model.parameters()).device)
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
    whole = token_logprobs(logits[len(prompt) - 1 : -1], ids[0, len(prompt) :], 1.0)
    return float((whole.cpu() - torch.tensor(logprobs)).abs().mean())
