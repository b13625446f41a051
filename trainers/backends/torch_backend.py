"""Training in PyTorch: one whole replica per rank, AdamW, padded or packed micro-batches."""

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from asyncrl.configs import RunConfig
from asyncrl.engine.data_plane.codec import pad_rows
from asyncrl.engine.model.causal_lm import token_logprobs
from asyncrl.engine.model.lora import has_adapter, merged_state, without_adapter
from asyncrl.engine.weights.base import State
from asyncrl.engine.weights.twins import with_twins, without_twins
from asyncrl.trainers.backends.base import Rows, StepSums, TrainingState
from asyncrl.trainers.backends.packing import Packing, has_varlen, has_windows, use_varlen
from asyncrl.trainers.backends.replica_state import OPTIMIZER, fill_optimizer, replica_state
from asyncrl.trainers.backends.trained import trained_mask
from asyncrl.trainers.loss.objective import Clip, Proximal, Reference, policy_loss_sums
from asyncrl.trainers.rank_state.saved import SavedState


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """How a backend computes log-probabilities, the loss and its updates.

    With a `reference_kl` over 0 a frozen copy of the model is kept (with an adapter, none is needed), and the loss adds
    that times the divergence from it. Importance weights of a proximal policy are truncated at `importance_cap`. Each
    sample takes a multiple of `align` positions of its row.
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
        if settings.packed and has_varlen(self._device, self._dtype):
            use_varlen(model)
        self.reset_optimizer()
        self.freeze_reference()

    def freeze_reference(self) -> None:
        if not self._settings.reference_kl or self._adapted:  # Without its adapter a model is its own reference.
            return
        if self._reference is None:
            self._reference = copy.deepcopy(self._model).requires_grad_(requires_grad=False)
        self._reference.load_state_dict(self._model.state_dict())

    def reset_optimizer(self) -> None:
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=0.0, betas=self._settings.betas, weight_decay=self._settings.weight_decay
        )

    def accumulate(self, rows: Rows, total_tokens: int) -> StepSums:
        logprobs = self._logprobs(rows.tokens, pad_to=rows.pad_to, extras=rows.extras)
        mask = trained_mask(rows, logprobs.shape)

        def placed(values: Sequence[torch.Tensor] | Sequence[float]) -> torch.Tensor:
            return self._moved(_placed(rows, values, logprobs))

        proximal, reference = None, None
        if rows.proximal_logprobs is not None:
            proximal = Proximal(placed(rows.proximal_logprobs), self._settings.importance_cap)
        if self._settings.reference_kl and rows.reference_logprobs is not None:
            scales = placed(rows.scales or [1.0] * len(rows.tokens))
            reference = Reference(placed(rows.reference_logprobs), scales, self._settings.reference_kl)
        sums = policy_loss_sums(
            logprobs,
            placed(rows.logprobs),
            placed(rows.advantages),
            self._moved(mask),
            self._settings.clip,
            proximal=proximal,
            reference=reference,
        )
        loss = sums.loss / max(total_tokens, 1)
        loss.backward()  # type: ignore[no-untyped-call]
        return StepSums(
            loss=float(loss.detach()),
            ratio=float(sums.ratio),
            clipped=int(sums.clipped),
            kl=float(sums.kl),
            tokens=int(sums.tokens),
            weight=float(sums.weight),
            used_weight=float(sums.used_weight),
            truncated=int(sums.truncated),
            reference_kl=float(sums.reference_kl),
        )

    @torch.no_grad()
    def logprobs(self, rows: Rows, *, reference: bool = False) -> list[torch.Tensor]:
        with without_adapter(self._model) if reference and self._adapted else nullcontext():
            logprobs = self._logprobs(rows.tokens, pad_to=rows.pad_to, extras=rows.extras, reference=reference).cpu()
        return [logprobs[i, at] for i, at in enumerate(_responses(rows))]

    def accumulate_supervised(self, tokens: Sequence[torch.Tensor], prompt_tokens: Sequence[int], total: int) -> float:
        logprobs = self._logprobs(tokens)
        mask = torch.zeros(logprobs.shape, dtype=torch.bool)
        for i, (row, prompt) in enumerate(zip(tokens, prompt_tokens, strict=True)):
            mask[i, prompt - 1 : row.shape[0] - 1] = True
        loss = -torch.where(self._moved(mask), logprobs, 0.0).sum() / max(total, 1)
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
        saved.check(state.tensors, state.frozen)
        for name, tensor in state.tensors.items():
            saved.read_into(name, tensor)

    def _logprobs(
        self,
        tokens: Sequence[torch.Tensor],
        *,
        pad_to: int = 0,
        extras: Mapping[str, Sequence[torch.Tensor]] | None = None,
        reference: bool = False,
    ) -> torch.Tensor:
        """Return log-probabilities (B, L - 1): at t, of the token at t + 1 given those up to t.

        L is the longest sample's length in multiples of `align`, or `pad_to`. Extras go to the model under
        their names, each concatenated over samples along the first dimension, as multimodal models take them.
        """
        model = self._reference if reference and self._reference is not None else self._model
        more = {name: self._moved(torch.cat(list(values))) for name, values in (extras or {}).items()}
        if self._settings.packed:
            return pad_rows(self._packed_logprobs(model, tokens, pad_to, more))
        length = pad_to or self._aligned(max(row.shape[0] for row in tokens))
        ids = self._moved(pad_rows([row.long() for row in tokens], self._pad_id, length))
        lengths = torch.tensor([row.shape[0] for row in tokens], device=self._device)
        attention = (torch.arange(ids.shape[1], device=self._device) < lengths.unsqueeze(1)).long()
        with self._precision():
            logits = model(input_ids=ids, attention_mask=attention, use_cache=False, **more).logits
        return token_logprobs(logits[:, :-1], ids[:, 1:], self._settings.temperature)

    def _packed_logprobs(
        self, model: Any, tokens: Sequence[torch.Tensor], pad_to: int, more: Mapping[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Run all samples as one row of T tokens; return log-probabilities of each, (L_i - 1).

        L_i is a multiple of `align`. Positions start anew in each sample, and a token attends only to earlier tokens of
        its own sample. No token is predicted from another sample. The padding of the row is a sample of its own.
        """
        rows = [self._filled(row.long(), self._aligned(row.shape[0])) for row in tokens]
        padding = pad_to - sum(row.shape[0] for row in rows)
        if padding > 0:
            rows.append(torch.full((padding,), self._pad_id))
        packing = Packing([row.shape[0] for row in rows])
        ids = self._moved(torch.cat(rows))
        arguments = packing.arguments(self._device, self._dtype, windows=self._windows)
        with self._precision():
            logits = model(input_ids=ids.unsqueeze(0), use_cache=False, **arguments, **more).logits[0]
        parts = zip(packing.split(logits), packing.split(ids), strict=True)
        return [token_logprobs(out[:-1], row[1:], self._settings.temperature) for out, row in parts][: len(tokens)]

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

    def _aligned(self, tokens: int) -> int:
        return -(-tokens // self._settings.align) * self._settings.align

    def _filled(self, row: torch.Tensor, length: int) -> torch.Tensor:
        return torch.nn.functional.pad(row, (0, length - row.shape[0]), value=self._pad_id)


def _responses(rows: Rows) -> list[slice]:
    """Return where each sample's outputs predict its response: the output at prompt - 1 predicts the first token."""
    return [slice(prompt - 1, ids.shape[0] - 1) for ids, prompt in zip(rows.tokens, rows.prompt_tokens, strict=True)]


def _placed(rows: Rows, values: Sequence[torch.Tensor] | Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """Place each sample's values (one per response token, or one for all) where it is predicted; 0 elsewhere.

    This is done on the CPU, where the values are: one copy to a GPU per sample would take longer.
    """
    out = torch.zeros(like.shape, dtype=like.dtype)
    for i, (at, value) in enumerate(zip(_responses(rows), values, strict=True)):
        out[i, at] = torch.as_tensor(value, dtype=out.dtype)
    return out
