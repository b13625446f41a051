"""The language model, for generators and trainer ranks alike: transformers' own classes."""

from typing import Any

import torch

from asyncrl.configs.sections.model import Model
from asyncrl.engine.model.checkpoint import load_checkpoint, outline
from asyncrl.engine.model.vector_math import settle_vector_math


def build_model(config: Model, *, vocab_size: int, seed: int) -> Any:
    """Load a Hugging Face checkpoint folder, or build a small Llama with weights from `seed`.

    Equal arguments give equal weights in every process. The model is in float32 and evaluation
    mode (there is no dropout to speak of in either). ConfigError for a folder that lacks a weight.
    """
    if config.path is not None:
        return load_checkpoint(config.path)
    settle_vector_math()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _small_llama(config, vocab_size).eval()


def outline_model(config: Model, *, vocab_size: int) -> Any:
    """Return the model that `build_model` gives, without weights: quick, and of no memory.

    ConfigError for a folder whose config.json describes no model.
    """
    if config.path is not None:
        return outline(config.path)
    with torch.device("meta"):
        return _small_llama(config, vocab_size)


def _small_llama(config: Model, vocab_size: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads,
            tie_word_embeddings=False,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )


def cast_weights(model: Any, dtype: torch.dtype) -> Any:
    """Return the model with its weights in `dtype`, as generators hold them.

    Buffers keep their type: rounded frequencies of rotary positions would make another model of it than the trainer's.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return log-probabilities of `tokens` (…) under `logits` (…, vocabulary) at a temperature, float32 or better."""
    precise = logits if logits.dtype == torch.float64 else logits.float()
    scaled = torch.log_softmax(precise / temperature, dim=-1)
    return scaled.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def rounding_limit(dtype: torch.dtype) -> float:
    """Return the mean difference of log-probabilities, in nats, above which two computations are not the same.

    Rounding stays well below it; a token that sees another sample, or too much of its own, goes well beyond.
    """
    return 1e-3 if dtype in (torch.float32, torch.float64) else 0.2
