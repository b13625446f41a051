"""The language model, for generators and trainer ranks alike: transformers' own classes."""

from typing import Any

import torch

from asyncrl.configs.schema import Model


def build_model(config: Model, *, vocab_size: int, seed: int) -> Any:
    """Load a Hugging Face checkpoint folder, or build a small Llama with weights from `seed`.

    Equal arguments give equal weights in every process. The model is in float32 and evaluation
    mode (there is no dropout to speak of in either).
    """
    if config.path is not None:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(config.path, local_files_only=True, dtype=torch.float32).eval()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _small_llama(config, vocab_size).eval()


def outline_model(config: Model, *, vocab_size: int) -> Any:
    """Return the model that `build_model` gives, without weights: quick, and of no memory."""
    with torch.device("meta"):
        if config.path is None:
            return _small_llama(config, vocab_size)
        from transformers import AutoConfig, AutoModelForCausalLM

        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.path, local_files_only=True))


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


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return log-probabilities of `tokens` (…) under `logits` (…, vocabulary) at a temperature, float32 or better."""
    precise = logits if logits.dtype == torch.float64 else logits.float()
    scaled = torch.log_softmax(precise / temperature, dim=-1)
    return scaled.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
