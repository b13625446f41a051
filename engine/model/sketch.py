"""A small model of a checkpoint's architecture, with random weights: what a run does with it can be tried at once."""

import copy
from typing import Any

import torch

WINDOW = 4
_LAYERS = 8
_PARAMETERS = 50_000_000
# What is made smaller, to at most so much. transformers maps a model's own names for them.
_WIDTHS = {
    "intermediate_size": 64,
    "n_inner": 64,
    "ffn_dim": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "window_size": WINDOW,
}
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def sketch_model(config: Any) -> Any | None:
    """Return a model with few and narrow layers of each kind, in evaluation mode; None where there is none so small.

    Windows are cut to 4 positions, so that short samples reach beyond them. Weights are large enough for
    each layer to matter: as initialized, most models say nearly the same after every token.
    """
    from transformers import AutoModelForCausalLM

    for narrow in (True, False):
        try:
            smaller = _smaller(config, narrow=narrow)
            with torch.device("meta"):
                outline = AutoModelForCausalLM.from_config(smaller)
            if sum(parameter.numel() for parameter in outline.parameters()) > _PARAMETERS:
                continue
            model = _lively(AutoModelForCausalLM.from_config(smaller, dtype=torch.float32)).eval()
            with torch.no_grad():
                model(input_ids=torch.arange(WINDOW).unsqueeze(0), use_cache=False)
        except Exception:  # An architecture's own code, with numbers that it was not made for: not a fault of the user.
            continue
        return model
    return None


def vocabulary(model: Any) -> int:
    """Return how many tokens a model knows."""
    return int(model.get_input_embeddings().weight.shape[0])


def _smaller(config: Any, *, narrow: bool) -> Any:
    smaller = copy.deepcopy(config)
    text = smaller.get_text_config()
    _cut_layers(text)
    for name, most in _WIDTHS.items():
        value = getattr(text, name, None)
        if isinstance(value, int) and value > most:
            setattr(text, name, most)
    for name in _TOKENS:
        value = getattr(text, name, None)
        if isinstance(value, list) or (isinstance(value, int) and value >= text.vocab_size):
            setattr(text, name, None)
    if narrow:
        _cut_heads(text)
    return smaller


def _cut_layers(text: Any) -> None:
    """Keep the first layers, so many that each kind is among them; lists with one entry a layer are cut with them."""
    layers = getattr(text, "num_hidden_layers", None)
    if not isinstance(layers, int):
        return
    kinds = getattr(text, "layer_types", None) or []
    kept = min(layers, max([2, *(kinds.index(kind) + 1 for kind in set(kinds))]), _LAYERS)
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == layers:
            setattr(text, name, value[:kept])
    text.num_hidden_layers = kept


def _cut_heads(text: Any) -> None:
    """Leave four heads of their width, or fewer; those that share keys go on sharing them."""
    heads, hidden = getattr(text, "num_attention_heads", None), getattr(text, "hidden_size", None)
    if not isinstance(heads, int) or not isinstance(hidden, int) or heads <= 4 or hidden % heads:
        return
    shared = getattr(text, "num_key_value_heads", None)
    text.num_attention_heads = 4
    text.hidden_size = 4 * (hidden // heads)
    if isinstance(shared, int) and "num_key_value_heads" in vars(text):
        text.num_key_value_heads = 4 if shared == heads else max(1, 4 * shared // heads)


def _lively(model: Any) -> Any:
    """Give matrices weights with which each layer's outputs are about as large as its inputs."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0.0, parameter.shape[-1] ** -0.5, generator=generator)
    return model


def layer_kinds(model: Any) -> str:
    """Name the kinds of a model's layers, as its configuration or else its classes do."""
    config = getattr(model, "config", None)
    kinds = getattr(config and config.get_text_config(), "layer_types", None)
    if not kinds:
        lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
        kinds = [type(layer).__name__ for layer in (lists[0] if lists else ())]
    return ", ".join(dict.fromkeys(kinds)) or "unknown"
