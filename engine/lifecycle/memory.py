"""How much memory each part of a run takes, by what it is for: an estimate from the model's configuration alone."""

from collections.abc import Mapping

from asyncrl.configs import RunConfig
from asyncrl.engine.lifecycle.engines import ELSEWHERE
from asyncrl.engine.model.causal_lm import outline_model
from asyncrl.engine.model.device import torch_dtype
from asyncrl.engine.model.lora import adapter_size
from asyncrl.engine.model.tokenizer import CharTokenizer

GIB = 1 << 30
_FLOAT = 4
_ACTIVATION_BYTES = 34
"""Per token, layer and hidden unit, of 16-bit numbers and with attention that keeps no scores (Korthikanti et al. 2022,
equation 2 without its last term)."""


def memory_of_rank(config: RunConfig) -> dict[str, float]:
    """Return the GiB of a rank, by purpose; without what PyTorch and its process take.

    Of a sharded model it has parts in float32; the gradients of several micro-batches are added up whole. Activations
    are those of a whole model, and so too many where ranks divide it.
    """
    model = outline_model(config.model, vocab_size=CharTokenizer.vocab_size)
    architecture = model.config.get_text_config()
    numbers = sum(parameter.numel() for parameter in model.parameters())
    trained = numbers if config.lora.rank is None else adapter_size(model, config.lora)
    width = torch_dtype(config.model.dtype).itemsize
    # Autocast keeps weights in float32; with weights in bfloat16 there are float32 masters, and gradients in both.
    narrow = width < _FLOAT and config.trainer.precision == "bf16_weights"
    weight, gradient, state = (width, width + _FLOAT, 3 * _FLOAT) if narrow else (_FLOAT, _FLOAT, 2 * _FLOAT)
    shared = config.trainer.model_ranks
    if shared > 1:
        weight, gradient, state = _FLOAT, _FLOAT, (3 if config.trainer.offload_optimizer else 2) * _FLOAT
    if config.trainer.backend == "megatron":  # Sums of gradients in float32, and AdamW's state divided over replicas.
        weight, gradient, state = width, _FLOAT, (3 if width < _FLOAT else 2) * _FLOAT
    optimizer = "optimizer, on the host" if config.trainer.offload_optimizer else "optimizer"
    tokens = config.trainer.micro_batch_tokens
    layers = architecture.num_hidden_layers
    # With activation checkpointing one layer is whole at a time, and of the others only what goes in.
    whole, inputs = (1, layers) if config.trainer.activation_checkpointing else (layers, 0)
    per_unit = whole * _ACTIVATION_BYTES / 2 + inputs
    parts = config.trainer.replica_ranks
    shares = config.trainer.replicas if config.trainer.backend == "megatron" else 1
    given = {
        "weights": numbers * weight / (parts * shared),
        "gradients": trained * gradient / parts,
        optimizer: trained * state / (parts * shares * shared),
        "activations": tokens * architecture.hidden_size * per_unit * width,
        "reference model": numbers * weight / (parts * shared) if config.trainer.reference_kl > 0 else 0,
    }
    return {name: amount / GIB for name, amount in given.items() if amount}


def memory_of_collector(config: RunConfig) -> dict[str, float]:
    """Return the GiB of a collector, by purpose; of an engine elsewhere only the weights that pass through."""
    model = outline_model(config.model, vocab_size=CharTokenizer.vocab_size)
    weights = (
        sum(parameter.numel() for parameter in model.parameters()) * torch_dtype(config.model.dtype).itemsize / GIB
    )
    if config.collector.engine in ELSEWHERE:
        return {"weights that come": weights}
    return {"weights": weights, "weights that come": weights, "cache, at most": config.collector.cache_gib}


def total(memory: Mapping[str, float], *, of_gpu: bool = False) -> float:
    """Return the sum, or that of what a GPU holds."""
    return sum(gib for name, gib in memory.items() if not (of_gpu and name.endswith("on the host")))
