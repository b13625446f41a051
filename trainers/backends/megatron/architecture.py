"""A transformers configuration as megatron's, and what cannot be represented exactly, refused by name.

Llama (and Llama 3's scaled rotary positions), Qwen2, Qwen3 and Qwen3-MoE.
"""

from typing import Any

import torch
from torch.nn.functional import silu

from asyncrl.engine.errors import ConfigError
from asyncrl.trainers.backends.megatron.settings import MegatronSettings, Split
from asyncrl.trainers.backends.router_replay import Routing

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
_ROTARY = ("default", "linear", "llama3")


def check_model(config: Any) -> None:
    """ConfigError for a model that megatron would compute otherwise than transformers."""
    kind = config.model_type
    if kind not in FAMILIES:
        raise ConfigError(f"trainer.backend megatron has no model of type {kind!r}; it has {', '.join(FAMILIES)}")
    rotary = config.rope_parameters
    wanted = {
        "hidden_act": (config.hidden_act, "silu"),
        "attention_bias": (bool(getattr(config, "attention_bias", False)), False),
        "mlp_bias": (bool(getattr(config, "mlp_bias", False)), False),
        "layer_types": (sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"}), []),
        "use_sliding_window": (bool(getattr(config, "use_sliding_window", False)), False),
        "partial_rotary_factor": (rotary.get("partial_rotary_factor") or 1.0, 1.0),
        "mlp_only_layers": (list(getattr(config, "mlp_only_layers", None) or ()), []),
        "decoder_sparse_step": (getattr(config, "decoder_sparse_step", 1), 1),
        "quantization_config": (getattr(config, "quantization_config", None), None),
    }
    for name, (value, needed) in wanted.items():
        if value != needed:
            raise ConfigError(
                f"trainer.backend megatron needs {name} {needed!r} in the model; this {kind} has {value!r}"
            )
    if rotary["rope_type"] not in _ROTARY:
        raise ConfigError(
            f"trainer.backend megatron has rotary positions of type {', '.join(_ROTARY)}; this {kind} has "
            f"{rotary['rope_type']!r}"
        )


def check_split(config: Any, split: Split, ranks: int) -> None:
    """ConfigError for a model or a number of ranks that cannot be split so."""
    experts = _experts(config)
    divided = {
        "trainer.ranks": (ranks, split.tensor * split.pipeline, "tensor_parallel * pipeline_parallel"),
        "the data parallel ranks": (ranks // (split.tensor * split.pipeline), split.expert, "expert_parallel"),
        "attention heads": (config.num_attention_heads, split.tensor, "tensor_parallel"),
        "key and value heads": (config.num_key_value_heads, split.tensor, "tensor_parallel"),
        "the width of the MLP": (config.intermediate_size, split.tensor, "tensor_parallel"),
        "layers": (config.num_hidden_layers, split.pipeline, "pipeline_parallel"),
        "experts": (experts, split.expert, "expert_parallel"),
    }
    for what, (value, parts, option) in divided.items():
        if value % parts:
            raise ConfigError(f"trainer.{option} is {parts}, which must divide {what}: {value}")
    if not experts and split.expert > 1:
        raise ConfigError(f"trainer.expert_parallel is {split.expert}; the model has no experts, so it must be 1")
    if experts and split.tensor > 1:
        raise ConfigError(
            f"trainer.tensor_parallel is {split.tensor}; with a mixture of experts megatron needs sequence parallelism "
            "for it, which needs Transformer Engine, so it must be 1"
        )


def routing(config: Any) -> Routing:
    """Return what the experts of a mixture are chosen from; ConfigError for a model without experts."""
    if not _experts(config):
        raise ConfigError(f"trainer.router_replay is true; the {config.model_type} has no experts, so it must be false")
    return Routing(config.num_hidden_layers, config.num_experts_per_tok, config.num_experts)


def padded_vocabulary(config: Any, split: Split) -> int:
    """Return the rows of the embedding: the vocabulary, in whole rows per tensor part. 12 over 8 parts has 16."""
    return int(-(-config.vocab_size // split.tensor) * split.tensor)


def head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def transformer_config(config: Any, settings: MegatronSettings, *, dtype: torch.dtype, device: torch.device) -> Any:
    """Return megatron's configuration; the model was checked."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    split, kind = settings.split, config.model_type
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_size(config),
        ffn_hidden_size=config.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        add_qkv_bias=kind == "qwen2",
        qk_layernorm=kind in ("qwen3", "qwen3_moe"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=split.tensor,
        pipeline_model_parallel_size=split.pipeline,
        expert_model_parallel_size=split.expert,
        # A pass of a pipeline has micro-batches of several lengths.
        variable_seq_lengths=split.pipeline > 1,
        # megatron refuses these with the default of this, even for a model without experts.
        moe_token_dispatcher_type="alltoall",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Gradients are summed, not averaged: a rank's loss is already a part of the whole batch's mean.
        calculate_per_token_loss=True,
        # Every weight is read from the model.
        perform_initialization=False,
        use_cpu_initialization=device.type == "cpu",
        transformer_impl="local",
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **(recompute if settings.recompute else {}),
        **(_mixture(config) if _experts(config) else {}),
    )


def _experts(config: Any) -> int:
    return int(config.num_experts) if config.model_type == "qwen3_moe" else 0


def _mixture(config: Any) -> dict[str, Any]:
    return {
        "num_moe_experts": config.num_experts,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_router_topk": config.num_experts_per_tok,
        # The softmax of the chosen logits is that of all, divided by the sum of the chosen.
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }
