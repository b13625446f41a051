"""Samples of one micro-batch are computed as each alone: tried on two short ones before anything is trained.

Packed rows need layers that know where a sample begins. Attention does; short convolutions, linear
attention and state spaces do not, unless their authors saw to it, and then nothing but the numbers shows it.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from asyncrl.engine.errors import ConfigError
from asyncrl.engine.model.causal_lm import rounding_limit, token_logprobs
from asyncrl.engine.model.sketch import WINDOW, vocabulary
from asyncrl.trainers.backends.base import Backend, Rows

LENGTHS = (2 * WINDOW + 3, 3 * WINDOW + 2)
_SMALL = 50_000_000
Outputs = dict[str, torch.Tensor]


class Alike:
    """What a model says of two samples, each alone, before a backend changes how the model attends.

    With `temperature` 1 the backend's log-probabilities are the model's.
    """

    def __init__(self, model: Any, *, temperature: float) -> None:
        device = next(model.parameters()).device
        random = torch.Generator().manual_seed(0)
        self._model = model
        self._samples = [torch.randint(vocabulary(model), (length,), generator=random) for length in LENGTHS]
        self._outputs: list[Outputs] = []
        self._alone: list[torch.Tensor] = []
        for sample in self._samples:
            ids = sample.to(device).unsqueeze(0)
            with torch.no_grad(), _watched(model) as outputs:
                logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
            self._alone.append(token_logprobs(logits[:-1], ids[0, 1:], temperature).cpu())
            self._outputs.append(outputs)

    def check(self, backend: Backend, *, packed: bool, align: int = 1, dtype: torch.dtype) -> None:
        """Refuse a backend that computes the two samples otherwise in one micro-batch: ConfigError.

        It packs them, each to a multiple of `align`, or pads them, and computes in `dtype`.
        """
        try:
            with _watched(self._model) as outputs:
                found = backend.logprobs(self._rows())
        except Exception as error:  # The model's own code, given a row as it was not written for.
            raise self._refusal(packed, f"fails on them: {error!r}") from error
        gap = max(float((ours - alone).abs().mean()) for ours, alone in zip(found, self._alone, strict=True))
        if not gap <= rounding_limit(dtype):
            first = self._first(outputs, align if packed else None)
            raise self._refusal(packed, f"gives them log-probabilities {gap:.2g} off on average{first}")

    def _rows(self) -> Rows:
        return Rows(
            tokens=self._samples,
            logprobs=[],
            prompt_tokens=[1] * len(self._samples),
            advantages=[],
            withheld=[],
            filler=False,
        )

    def _refusal(self, packed: bool, what: str) -> ConfigError:
        model = type(self._model).__name__
        if packed:
            return ConfigError(
                f"trainer.packed is true, and packed samples must be to {model} as each alone: it {what}. "
                "Set trainer.packed to false"
            )
        return ConfigError(f"padded samples must be to {model} as each alone: it {what}. This model cannot be trained")

    def _first(self, together: Outputs, align: int | None) -> str:
        """Name the module that is the first to give a sample other outputs than alone, and its layer's kind."""
        modules = dict(self._model.named_modules())
        for name, output in together.items():
            for i, alone in enumerate(self._outputs):
                mine = _part(output, i, align)
                expected = alone.get(name)
                if expected is None or mine is None or mine.shape != expected[0].shape:
                    continue
                if float((mine - expected[0]).abs().max()) > 0.01 * float(expected.abs().max()):
                    # What differs first is a part of the culprit: layers.0.conv.out of layers.0.conv.
                    found = re.match(r".*?\.\d+\.[^.]+", name)
                    part = found[0] if found else name
                    return f"; {part}, a {type(modules[part]).__name__}{self._kind(part)}, is the first to differ"
        return ""

    def _kind(self, name: str) -> str:
        config = getattr(self._model, "config", None)
        kinds: Sequence[str] = getattr(config and config.get_text_config(), "layer_types", None) or ()
        layer = re.search(r"\.(\d+)\.", f"{name}.")
        return f" in a layer of {kinds[int(layer[1])]}" if layer and int(layer[1]) < len(kinds) else ""


def _part(output: torch.Tensor, sample: int, align: int | None) -> torch.Tensor | None:
    """Cut one sample's outputs out of all: of a packed row (1, T, …), or with `align` None of padded ones (B, L, …)."""
    at = 0 if align is None else sum(-(-length // align) * align for length in LENGTHS[:sample])
    row = sample if align is None else 0
    return output[row, at : at + LENGTHS[sample]] if row < output.shape[0] and output.ndim > 2 else None


@contextmanager
def _watched(model: Any) -> Iterator[Outputs]:
    """Collect what each module of a small model gives, in order; of a large one it would be too much."""
    outputs: Outputs = {}
    small = sum(parameter.numel() for parameter in model.parameters()) <= _SMALL

    def keep(name: str, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, torch.Tensor) and first.is_floating_point() and first.ndim > 2:
            outputs[name] = first.detach().float().cpu()

    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output, name=name: keep(name, output))
        for name, module in model.named_modules()
        if name and small
    ]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()
