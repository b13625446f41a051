"""Training in PyTorch: one whole replica per rank, AdamW, padded or packed micro-batches."""

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from asyncrl.configs import RunConfig
from asyncrl.engine.model.lora import has_adapter, merged_state, without_adapter
from asyncrl.engine.weights.base import State
from asyncrl.engine.weights.twins import with_twins, without_twins
from asyncrl.trainers.backends.base import Rows, StepSums, TrainingState
from asyncrl.trainers.backends.chosen import Scores
from asyncrl.trainers.backends.layout import Layout
from asyncrl.trainers.backends.next_tokens import NextTokens, is_lean
from asyncrl.trainers.backends.optimizer import adamw
from asyncrl.trainers.backends.packing import has_varlen, has_windows, use_varlen
from asyncrl.trainers.backends.recompute import recompute_layers
from asyncrl.trainers.backends.replica_state import OPTIMIZER, fill_optimizer, replica_state
from asyncrl.trainers.backends.responses import token_values
from asyncrl.trainers.backends.sharing import SharedPrompts, can_share
from asyncrl.trainers.backends.trained import trained_flags
from asyncrl.trainers.loss.objective import Clip, Proximal, Reference, TokenSums, policy_loss_sums
from asyncrl.trainers.rank_state.saved import SavedState

_SUMS = ("ratio", "clipped", "kl", "tokens", "weight", "used_weight", "truncated", "reference_kl")


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """How a backend computes log-probabilities, the loss and its updates.

    With a `reference_kl` over 0 a frozen copy of the model is kept (with an adapter, none is needed), and the loss adds
    that times the divergence from it. Importance weights of a proximal policy are truncated at `importance_cap`. Each
    sample takes a multiple of `align` positions of its row; with `share_prompts` those of one prompt may have one row.
    Logits of `chunk` positions exist at a time; None: as many as suit the device. With `recompute` layers keep their
    inputs alone, and a backward pass computes the rest again.
    """

    temperature: float
    clip: Clip
    betas: tuple[float, float]
    weight_decay: float
    max_grad_norm: float
    packed: bool = False
    importance_cap: float = 2.0
    reference_kl: float = 0.0
    align: int = 1
    share_prompts: bool = False
    chunk: int | None = None
    decay_vectors: bool = True
    recompute: bool = False

    @classmethod
    def of(cls, config: RunConfig) -> "TorchSettings":
        """Take what a run's configuration says."""
        trainer = config.trainer
        return cls(
            temperature=config.rollout.temperature,
            clip=Clip(trainer.clip_low, trainer.clip_high, trainer.dual_clip),
            betas=(trainer.beta1, trainer.beta2),
            weight_decay=trainer.weight_decay,
            max_grad_norm=trainer.max_grad_norm,
            packed=trainer.packed,
            importance_cap=trainer.importance_cap,
            reference_kl=trainer.reference_kl,
            align=trainer.align,
            share_prompts=trainer.share_prompts,
            decay_vectors=trainer.decay_vectors,
            recompute=trainer.activation_checkpointing,
        )


class TorchBackend:
    """`temperature` is the sampling temperature, so that the ratio of an unchanged policy is 1.

    Models compute in `compute_dtype` (default: that of the weights) under autocast: weights, gradients and moments keep
    their dtype.
    """

    def __init__(
        self, model: Any, settings: TorchSettings, *, pad_id: int, compute_dtype: torch.dtype | None = None
    ) -> None:
        self._model = model
        self._settings = settings
        self._pad_id = pad_id
        self._reference: Any = None
        self._adapted = has_adapter(model)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._device = self._parameters[0].device
        self._dtype = compute_dtype or self._parameters[0].dtype
        self._windows = settings.packed and has_windows(model)
        # Both are tried before attention changes to one that every pass must bring the bounds of samples.
        self._lean = is_lean(model)
        self._shares = settings.share_prompts and not settings.packed and can_share(model)
        self._next_tokens = self._scorer(model)
        if settings.packed and has_varlen(self._device, self._dtype):
            use_varlen(model)
        self.reset_optimizer()
        self.freeze_reference()
        if settings.recompute:  # After the reference was copied, which has no backward pass.
            recompute_layers(model)

    def freeze_reference(self) -> None:
        if not self._settings.reference_kl or self._adapted:  # Without its adapter a model is its own reference.
            return
        if self._reference is None:
            self._reference = copy.deepcopy(self._model).requires_grad_(requires_grad=False)
            self._frozen = self._scorer(self._reference)
        self._reference.load_state_dict(self._model.state_dict())

    def reset_optimizer(self) -> None:
        settings = self._settings
        self._optimizer = adamw(
            self._parameters,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            decay_vectors=settings.decay_vectors,
        )

    def accumulate(self, rows: Rows, total_tokens: int) -> StepSums:
        settings = self._settings
        layout = self._shared(rows) or self._layout(rows.tokens, rows.pad_to)
        counts = layout.responses(rows.prompt_tokens)
        chosen = trained_flags(rows)
        wanted = _wanted(layout, rows.prompt_tokens)[:, chosen]
        scores = self._scores(layout, wanted, extras=rows.extras)
        named = token_values(rows, counts, scores.logprobs.dtype, reference=settings.reference_kl > 0)
        moved = self._moved(torch.stack([values[chosen] for values in named.values()]))
        values = dict(zip(named, moved, strict=True))
        proximal, reference = None, None
        if "proximal" in values:
            proximal = Proximal(values["proximal"], settings.importance_cap)
        if "reference" in values:
            reference = Reference(values["reference"], values["scales"], settings.reference_kl)
        sums = policy_loss_sums(
            scores.logprobs,
            values["behaviour"],
            values["advantages"],
            torch.ones_like(scores.logprobs, dtype=torch.bool),
            settings.clip,
            proximal=proximal,
            reference=reference,
        )
        loss = sums.loss / max(total_tokens, 1)
        loss.backward()  # type: ignore[no-untyped-call]
        return _step_sums(loss.detach(), sums, scores.entropies.sum())

    @torch.no_grad()
    def logprobs(self, rows: Rows, *, reference: bool = False) -> list[torch.Tensor]:
        layout = self._shared(rows) or self._layout(rows.tokens, rows.pad_to)
        wanted = _wanted(layout, rows.prompt_tokens)
        with without_adapter(self._model) if reference and self._adapted else nullcontext():
            scores = self._scores(layout, wanted, extras=rows.extras, reference=reference)
        return list(torch.split(scores.logprobs.cpu(), layout.responses(rows.prompt_tokens)))

    def accumulate_supervised(self, tokens: Sequence[torch.Tensor], prompt_tokens: Sequence[int], total: int) -> float:
        layout = self._layout(tokens)
        loss = -self._scores(layout, _wanted(layout, prompt_tokens)).logprobs.sum() / max(total, 1)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def gradients(self) -> torch.Tensor:
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in self._parameters])
        self._optimizer.zero_grad(set_to_none=True)
        return flat

    def apply(self, gradients: torch.Tensor, *, learning_rate: float) -> float:
        norm = float(torch.linalg.vector_norm(gradients, dtype=torch.float64))
        if not torch.isfinite(torch.tensor(norm)):
            raise FloatingPointError(f"the gradient's norm is {norm}; the weights were left as they are")
        scale = min(1.0, self._settings.max_grad_norm / (norm + 1e-6))
        at = 0
        for parameter in self._parameters:
            part = gradients[at : at + parameter.numel()]
            parameter.grad = (part * scale).reshape(parameter.shape)
            at += parameter.numel()
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def state(self) -> State:
        """Return the weights in the dtype of computation, an adapter merged into them; buffers keep their own.

        Tied weights stay one tensor.
        """
        state = self._model.state_dict(keep_vars=True)
        kept, twins = without_twins(merged_state(self._model, self._dtype) if self._adapted else state)
        cast = {
            name: value.detach().to(self._dtype) if isinstance(value, torch.nn.Parameter) else value
            for name, value in kept.items()
        }
        return with_twins(cast, twins)

    def training_state(self) -> TrainingState:
        return replica_state(self._model, self._optimizer, self._reference)

    def load_training_state(self, saved: SavedState) -> None:
        self.reset_optimizer()
        if any(name.startswith(OPTIMIZER) for name in saved.names):
            fill_optimizer(self._optimizer)
        state = self.training_state()
        saved.check(state.saved, state.frozen)
        for name, tensor in state.saved.items():
            saved.read_into(name, tensor)

    def _scorer(self, model: Any) -> NextTokens:
        settings = self._settings
        return NextTokens(model, temperature=settings.temperature, lean=self._lean, chunk=settings.chunk)

    def _layout(self, tokens: Sequence[torch.Tensor], pad_to: int = 0) -> Layout:
        place = Layout.packed if self._settings.packed else Layout.padded
        return place(tokens, pad_id=self._pad_id, align=self._settings.align, pad_to=pad_to)

    def _shared(self, rows: Rows) -> SharedPrompts | None:
        """Lay samples out with their prompts shared, where that is possible and saves enough."""
        if not self._shares or rows.extras or rows.pad_to:
            return None
        return SharedPrompts.of(rows.tokens, rows.prompt_tokens, pad_id=self._pad_id)

    def _scores(
        self,
        layout: Layout | SharedPrompts,
        wanted: torch.Tensor,
        *,
        extras: Mapping[str, Sequence[torch.Tensor]] | None = None,
        reference: bool = False,
    ) -> Scores:
        """Return the scores of tokens: `wanted` (2, N) has the positions that predict them, and their ids.

        Extras go to the model under their names, each concatenated over samples along the first dimension, as
        multimodal models take them.
        """
        more = {name: self._moved(torch.cat(list(values))) for name, values in (extras or {}).items()}
        arguments: dict[str, Any] = {}
        if isinstance(layout, SharedPrompts):
            arguments = layout.arguments(self._device, self._dtype)
        elif layout.packing is not None:
            arguments = layout.packing.arguments(self._device, self._dtype, windows=self._windows)
        elif more or not self._lean:
            arguments = {"attention_mask": self._moved(layout.attention())}
        # Else there is no mask: no token of causal attention sees the padding to its right, and the kernels without
        # masks are faster.
        index, tokens = self._moved(wanted)
        scorer = self._frozen if reference and not self._adapted else self._next_tokens
        with self._precision():
            return scorer.scores(self._moved(layout.ids), index, tokens, {**arguments, **more})

    def _precision(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        if self._dtype == self._parameters[0].dtype:
            return nullcontext()
        return torch.autocast(self._device.type, self._dtype)

    def _moved(self, values: torch.Tensor) -> torch.Tensor:
        """Bring a tensor to the device; to a GPU from pinned memory, so that the CPU need not wait."""
        if self._device.type == "cuda":
            return values.pin_memory().to(self._device, non_blocking=True)
        return values.to(self._device)


def _wanted(layout: Layout | SharedPrompts, prompt_tokens: Sequence[int]) -> torch.Tensor:
    """Return, for each token of the responses, which position predicts it, and its id: (2, tokens)."""
    return torch.stack([layout.predictors(prompt_tokens), layout.predicted(prompt_tokens)])


def _step_sums(loss: torch.Tensor, sums: TokenSums, entropy: torch.Tensor) -> StepSums:
    """Bring all sums from the device at once: each copy waits for the device."""
    counts = {"clipped", "tokens", "truncated"}
    of_device = {"loss": loss, "entropy": entropy, **{name: getattr(sums, name) for name in _SUMS}}
    found = torch.stack([value.detach().double() for value in of_device.values()]).tolist()
    return StepSums(**{name: int(x) if name in counts else x for name, x in zip(of_device, found, strict=True)})
