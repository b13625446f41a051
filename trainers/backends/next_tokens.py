"""A model's log-probabilities of next tokens at some positions: its body for all, its output head for those alone."""

from collections.abc import Callable, Mapping
from typing import Any

import structlog
import torch

from asyncrl.trainers.backends.chosen import Scores, chosen_scores

log = structlog.get_logger()

# Elements of a chunk of logits. On a GPU 512 MB in float32, and where nothing is written in float32 1 GB in bfloat16:
# for each chunk the whole gradient of the head is read and written. On a CPU 64 MB: glibc returns blocks of that size
# to the system, and loses room by smaller ones.
CUDA_CHUNK = 2**27
FUSED_CHUNK = 2**29
CPU_CHUNK = 2**24
_TRIED = 100.0


class Head:
    """A transformers model's output head: hidden states (…, width) to logits (…, vocabulary).

    Gemma caps its logits, Cohere multiplies them by a scale, and Granite divides them by one, after the output matrix.
    """

    def __init__(self, model: Any) -> None:
        self.matrix = model.get_output_embeddings()
        text = model.config.get_text_config()
        self._cap = getattr(text, "final_logit_softcapping", None)
        self._factor = getattr(model, "logit_scale", None)
        self._divisor = getattr(text, "logits_scaling", None)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.matrix(hidden)
        if self._factor is not None:
            logits = logits * self._factor
        if self._divisor is not None:
            logits = logits / self._divisor
        if self._cap is not None:
            logits = torch.tanh(logits / self._cap) * self._cap
        return logits


class NextTokens:
    """Scores next tokens by a model. `lean`: by its body, then its head in chunks; else from whole logits.

    `fused`: the logits are read by compiled kernels.
    """

    def __init__(
        self, model: Any, *, temperature: float, lean: bool, chunk: int | None = None, fused: bool = False
    ) -> None:
        self._model = model
        self._temperature = temperature
        self._chunk = chunk
        self._fused = fused
        self._head = Head(model) if lean else None

    def scores(
        self, ids: torch.Tensor, index: torch.Tensor, tokens: torch.Tensor, arguments: Mapping[str, Any]
    ) -> Scores:
        """Return the scores of `tokens` (N) after the positions `index` (N) of `ids` (B, L), counted row by row.

        `arguments` go to the model beside the ids.
        """
        if self._head is None:
            logits = self._model(input_ids=ids, use_cache=False, **arguments).logits
            chosen = logits.flatten(0, 1).index_select(0, index)
            return self._scores(lambda some: some, chosen, tokens, logits.shape[-1], recompute=False)
        hidden = _hidden(self._model, self._model, ids, arguments)
        chosen = hidden.flatten(0, 1).index_select(0, index)
        return self._scores(self._head, chosen, tokens, self._head.matrix.weight.shape[0], recompute=True)

    def _scores(
        self, logits_of: Any, inputs: torch.Tensor, tokens: torch.Tensor, vocabulary: int, *, recompute: bool
    ) -> Scores:
        elements = (FUSED_CHUNK if self._fused else CUDA_CHUNK) if inputs.is_cuda else CPU_CHUNK
        chunk = self._chunk or max(1, elements // vocabulary)
        return chosen_scores(
            logits_of,
            inputs,
            tokens,
            temperature=self._temperature,
            chunk=chunk,
            recompute=recompute,
            fused=self._fused,
        )


def is_lean(model: Any) -> bool:
    """Return whether a model's logits are its head's of its body's hidden states, by trying; else warn.

    The head is tried where its logits reach 100: a cap on them changes small ones by too little to be seen.
    """
    why = _difference(model)
    if why is not None:
        log.warning(
            "the output head of this model cannot run in parts; logits of whole samples are kept, which takes memory",
            model=type(model).__name__,
            why=why,
        )
    return why is None


@torch.no_grad()
def _difference(model: Any) -> str | None:
    """Return how the model's logits differ from those of its body and head; None if they do not."""
    if not all(hasattr(model, name) for name in ("get_decoder", "get_output_embeddings", "config")):
        return "it has no body and head by transformers' names"
    head = Head(model)
    if model.get_decoder() is model or not hasattr(head.matrix, "weight"):
        return "it has no body and head by transformers' names"
    device = head.matrix.weight.device
    ids = (torch.arange(5, device=device) % head.matrix.weight.shape[0]).unsqueeze(0)
    try:
        # Not `model(…)`: whoever watches it by a hook is to see what is trained.
        if model.forward(input_ids=ids, use_cache=False, logits_to_keep=1).logits.shape[1] != 1:
            return "it computes logits of every position, whatever is asked for"
        hidden = _hidden(model, model.forward, ids, {})
        factor = _TRIED / head.matrix(hidden).abs().max()
        expected = _magnified(model, ids, factor)
        found = head(hidden * factor)
    except Exception as error:  # The model's code may raise anything for a body that is run alone.
        return repr(error)
    if found.shape != expected.shape:
        return f"the shape of its logits is {tuple(expected.shape)}, and of its head's {tuple(found.shape)}"
    gap = float((found.float() - expected.float()).abs().max())
    allowed = (0.05 if hidden.dtype in (torch.bfloat16, torch.float16) else 1e-4) * _TRIED
    return None if gap <= allowed else f"its logits are {gap:.2g} off, of up to {_TRIED:g}"


def _hidden(model: Any, run: Callable[..., Any], ids: torch.Tensor, arguments: Mapping[str, Any]) -> torch.Tensor:
    """Return the hidden states (B, L, width) that a model's body gives to its head, which runs for one position only.

    The body is not called by itself, because the model prepares its inputs, such as images.
    """
    kept: list[torch.Tensor] = []
    hook = model.get_decoder().register_forward_hook(lambda _module, _inputs, output: kept.append(output[0]))
    try:
        run(input_ids=ids, use_cache=False, logits_to_keep=1, **arguments)
    finally:
        hook.remove()
    (hidden,) = kept
    return hidden


def _magnified(model: Any, ids: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return what the whole model says if the hidden states that its body gives it are multiplied by a factor."""

    def magnify(_module: Any, _inputs: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state * factor
        return output

    hook = model.get_decoder().register_forward_hook(magnify)
    try:
        logits: torch.Tensor = model.forward(input_ids=ids, use_cache=False).logits
    finally:
        hook.remove()
    return logits
