"""Checks, before anything is trained, that samples in one micro-batch are computed as if each were alone.

Packed rows need layers that know where a sample begins. Attention does. Short convolutions, linear attention and state
spaces do not, unless their authors took care of it. They raise no error; only the numbers are wrong. So two short
samples are tried.
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
from asyncrl.trainers.backends.compiled import eager

LENGTHS = (2 * WINDOW + 3, 3 * WINDOW + 2)
_SMALL = 50_000_000
Outputs = dict[str, torch.Tensor]


class Alike:
    """A model's outputs for two samples, each alone, before a backend changes the model's attention.

    `temperature` divides the logits, as in the backend.
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
        """ConfigError if a backend computes the two samples differently in one micro-batch.

        The backend packs them, each padded to a multiple of `align`, or pads them, and computes in `dtype`.
        """
        try:
            with eager(), _watched(self._model) as outputs:
                found = backend.logprobs(self._rows())
        except Exception as error:  # The model's code may raise anything for a row that it was not written for.
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
        """Name the first module whose outputs for a sample differ from those for it alone, and its kind of layer."""
        modules = dict(self._model.named_modules())
        for name, output in together.items():
            for i, alone in enumerate(self._outputs):
                mine = _part(output, i, align)
                expected = alone.get(name)
                if expected is None or mine is None or mine.shape != expected[0].shape:
                    continue
                if float((mine - expected[0]).abs().max()) > 0.01 * float(expected.abs().max()):
                    # The first difference may be in a part of the culprit, as in layers.0.conv.out of layers.0.conv.
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
    """Return one sample's outputs out of a packed row (1, T, …), or with `align` None out of padded rows (B, L, …)."""
    at = 0 if align is None else sum(-(-length // align) * align for length in LENGTHS[:sample])
    row = sample if align is None else 0
    return output[row, at : at + LENGTHS[sample]] if row < output.shape[0] and output.ndim > 2 else None


@contextmanager
def _watched(model: Any) -> Iterator[Outputs]:
    """Collect the outputs of each module, in order. Those of a large model would take too much memory: none."""
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
