"""Training in PyTorch: a whole replica per rank or a sharded one, AdamW, padded or packed micro-batches."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import torch

from asyncrl.engine.model.lora import has_adapter, merged_state, without_adapter
from asyncrl.engine.model.off_load import OffLoad
from asyncrl.engine.model.routers import Replay
from asyncrl.engine.records.columns import ROUTED_EXPERTS
from asyncrl.engine.weights.base import State
from asyncrl.engine.weights.twins import with_twins, without_twins
from asyncrl.trainers.backends.base import DeviceSums, Rows, TrainingState
from asyncrl.trainers.backends.chosen import Scores
from asyncrl.trainers.backends.compiled import compile_layers
from asyncrl.trainers.backends.layout import Layout, suits_rows
from asyncrl.trainers.backends.next_tokens import NextTokens, is_lean
from asyncrl.trainers.backends.optimizer import adamw
from asyncrl.trainers.backends.packing import has_varlen, has_windows, moved, use_varlen
from asyncrl.trainers.backends.recompute import recompute_layers
from asyncrl.trainers.backends.replica_state import OPTIMIZER, fill_optimizer, replica_state
from asyncrl.trainers.backends.responses import wanted_of
from asyncrl.trainers.backends.router_replay import Routing, without_experts
from asyncrl.trainers.backends.rows_loss import device_sums, loss_values, rows_loss
from asyncrl.trainers.backends.sharded import ShardedTokens, Shards
from asyncrl.trainers.backends.sharing import SharedPrompts, can_share
from asyncrl.trainers.backends.torch_settings import TorchSettings
from asyncrl.trainers.backends.trained import trained_flags, where_trained
from asyncrl.trainers.backends.trained_weights import TrainedWeights, round_weights
from asyncrl.trainers.rank_state.saved import SavedState


class TorchBackend:
    """`temperature` is the sampling temperature, so that the ratio of an unchanged policy is 1.

    Models compute in `compute_dtype` (default: that of the weights): under autocast, or with weights rounded to it.
    What is updated, sums of gradients and moments keep the dtype that the weights came in. With `shards` the model
    comes whole in the host's memory, and this rank keeps its parts of the weights on the shards' device.
    """

    def __init__(
        self,
        model: Any,
        settings: TorchSettings,
        *,
        pad_id: int,
        compute_dtype: torch.dtype | None = None,
        shards: Shards | None = None,
    ) -> None:
        self._model = model
        self._settings = settings
        self._pad_id = pad_id
        self._shards = shards
        self._adapted = has_adapter(model)
        first = next(p for p in model.parameters() if p.requires_grad)
        self._device = first.device if shards is None else shards.device
        self._away = OffLoad(self._device)
        self._dtype = compute_dtype or first.dtype
        low = self._dtype if settings.low_weights and self._dtype != first.dtype else None
        self._casts = low is None and self._dtype != first.dtype
        self._windows = settings.packed and has_windows(model)
        varlen = settings.packed and has_varlen(self._device, self._dtype)
        # Both are tried before attention changes to one that every pass must bring the bounds of samples.
        self._lean = is_lean(model)
        plain = not settings.packed and not settings.router_replay
        self._shares = settings.share_prompts and plain and can_share(model)
        # Rows with windows need a mask, and the attention that takes bounds gets none.
        self._takes_rows = varlen and self._lean and not self._windows
        if varlen:
            use_varlen(model)
        self._reference = self._copied(low)
        if settings.fused:
            for one in (model, self._reference):
                if one is not None:
                    compile_layers(one)
        # After the reference was copied, which chooses by itself.
        self._replay = Replay(model) if settings.router_replay else None
        if settings.recompute:  # After the reference was copied, which has no backward pass.
            recompute_layers(model)
        self._next_tokens = self._scorer(model, low, reshard=settings.reshard)
        self._frozen = self._scorer(self._reference, low, reshard=True) if self._reference is not None else None
        self._weights = TrainedWeights(model, low=low if shards is None else None, offload=settings.offload)
        self.reset_optimizer()

    def freeze_reference(self) -> None:
        if self._reference is not None:
            self._reference.load_state_dict(self._model.state_dict())

    def reset_optimizer(self) -> None:
        settings = self._settings
        self._optimizer = adamw(
            list(self._weights.masters.values()),
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            decay_vectors=settings.decay_vectors,
        )
        fill_optimizer(self._optimizer)

    def accumulate(self, rows: Rows, total_tokens: int) -> DeviceSums:
        settings = self._settings
        layout = self._shared(rows) or self._layout(rows.tokens, rows.pad_to, rows.extras)
        counts = layout.responses(rows.prompt_tokens)
        chosen = trained_flags(rows)
        wanted = where_trained(wanted_of(layout, rows.prompt_tokens), chosen)
        # Before the pass: between it and the loss a GPU would wait for them.
        precise = torch.float64 if self._dtype == torch.float64 else torch.float32
        values = loss_values(
            rows, chosen, counts, reference=settings.reference_kl > 0, dtype=precise, device=self._device
        )
        scores = self._scores(layout, wanted, extras=rows.extras)
        sums = rows_loss(
            values,
            scores.logprobs,
            clip=settings.clip,
            importance_cap=settings.importance_cap,
            reference_kl=settings.reference_kl,
        )
        loss = sums.loss / max(total_tokens, 1)
        self._sum_gradients(last=rows.last)
        loss.backward()  # type: ignore[no-untyped-call]
        return DeviceSums(device_sums(loss, sums, scores.entropies))

    @torch.no_grad()
    def logprobs(self, rows: Rows, *, reference: bool = False) -> list[torch.Tensor]:
        layout = self._shared(rows) or self._layout(rows.tokens, rows.pad_to, rows.extras)
        wanted = wanted_of(layout, rows.prompt_tokens)
        with without_adapter(self._model) if reference and self._adapted else nullcontext():
            scores = self._scores(layout, wanted, extras=rows.extras, reference=reference)
        return list(torch.split(scores.logprobs.cpu(), layout.responses(rows.prompt_tokens)))

    def accumulate_supervised(self, tokens: Sequence[torch.Tensor], prompt_tokens: Sequence[int], total: int) -> float:
        layout = self._layout(tokens)
        loss = -self._scores(layout, wanted_of(layout, prompt_tokens)).logprobs.sum() / max(total, 1)
        self._sum_gradients(last=True)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    @property
    def sums_gradients(self) -> bool:
        return self._shards is not None

    def gradients(self) -> torch.Tensor:
        return self._weights.gradients()

    def apply(self, gradients: torch.Tensor, *, learning_rate: float) -> float:
        norm = float(torch.linalg.vector_norm(gradients, dtype=torch.float64))
        if self._shards is not None:
            norm = math.sqrt(self._shards.total(norm**2))
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient's norm is {norm}; the weights were left as they are")
        scale = min(1.0, self._settings.max_grad_norm / (norm + 1e-6))
        masters = list(self._weights.masters.values())
        sizes = [master.numel() for master in masters]
        scaled = (gradients * scale).to(masters[0].device)
        for master, part in zip(masters, torch.split(scaled, sizes), strict=True):
            master.grad = part.reshape(master.shape)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._weights.updated()
        return norm

    def state(self) -> State:
        """Return the weights in the dtype of computation, an adapter merged into them; buffers keep their own.

        Tied weights stay one tensor. Sharded weights come in the host's memory, to rank 0 alone.
        """
        if isinstance(self._next_tokens, ShardedTokens):
            leads = self._shards is not None and self._shards.leads
            whole: dict[str, torch.Tensor] = {}
            for bucket in self.buckets():
                whole |= {name: value.to("cpu", copy=True) for name, value in bucket.items() if leads}
            return with_twins(whole, self._next_tokens.twins) if leads else {}
        state = self._model.state_dict(keep_vars=True)
        kept, twins = without_twins(merged_state(self._model, self._dtype) if self._adapted else state)
        cast = {
            name: value.detach().to(self._dtype) if isinstance(value, torch.nn.Parameter) else value
            for name, value in kept.items()
        }
        return with_twins(cast, twins)

    def buckets(self) -> Iterator[State]:
        if isinstance(self._next_tokens, ShardedTokens):
            yield from self._next_tokens.buckets(self._dtype)
        else:
            yield self.state()

    def training_state(self) -> TrainingState:
        if isinstance(self._next_tokens, ShardedTokens):
            self._next_tokens.reshard()
        return replica_state(
            self._model, self._weights, self._optimizer, self._reference, device=self._device, shards=self._shards
        )

    def sleep(self) -> None:
        models = [one for one in (self._model, self._reference) if one is not None]
        weights = [weight for model in models for weight in model.parameters()]
        kept = [value for state in self._optimizer.state.values() for value in state.values()]
        self._away.leave([*weights, *self._weights.masters.values(), *kept])

    def wake(self) -> None:
        self._away.come_back()

    def load_training_state(self, saved: SavedState) -> None:
        self.reset_optimizer()
        state = self.training_state()
        begun = any(name.startswith(OPTIMIZER) for name in saved.names)
        # What was saved before the first update may be without moments; they are zeros then.
        expected = {name: value for name, value in state.saved.items() if begun or not name.startswith(OPTIMIZER)}
        saved.check(expected, state.frozen, state.places)
        for name, tensor in expected.items():
            saved.read_into(name, tensor, state.places.get(name))
        self._weights.updated()

    def _copied(self, low: torch.dtype | None) -> Any:
        """Return the reference model; None if the loss has none, or if it is the model without its adapter."""
        if not self._settings.reference_kl or self._adapted:
            return None
        reference = copy.deepcopy(self._model).requires_grad_(requires_grad=False)
        if low is not None and self._shards is None:
            round_weights(reference, low)
        return reference

    def _scorer(
        self, model: Any, low: torch.dtype | None, *, reshard: bool | None = True
    ) -> NextTokens | ShardedTokens:
        settings = self._settings
        scorer = NextTokens(
            model, temperature=settings.temperature, lean=self._lean, chunk=settings.chunk, fused=settings.fused
        )
        return scorer if self._shards is None else self._shards.split(model, scorer, low=low, reshard=reshard)

    def _sum_gradients(self, *, last: bool) -> None:
        if isinstance(self._next_tokens, ShardedTokens):
            self._next_tokens.sum_gradients(last=last)

    def _layout(
        self,
        tokens: Sequence[torch.Tensor],
        pad_to: int = 0,
        extras: Mapping[str, Sequence[torch.Tensor]] = MappingProxyType({}),
    ) -> Layout:
        """Lay samples out: packed if the settings say so, unless they are as good in rows, which are faster."""
        rows = self._takes_rows and not pad_to and not without_experts(extras) and suits_rows(tokens)
        place = Layout.packed if self._settings.packed and not rows else Layout.padded
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
        if self._replay is not None:
            routed = None if reference else (extras or {}).get(ROUTED_EXPERTS)
            assert isinstance(layout, Layout), "prompts are not shared where rows bring more than tokens"
            placed = None if routed is None else Routing.of(self._replay).placed(routed, layout)
            self._replay.take(None if placed is None else self._moved(placed))
        own = without_experts(extras or {})
        more = {name: self._moved(torch.cat(list(values))) for name, values in own.items()}
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
        assert scorer is not None, "there is no reference model without trainer.reference_kl"
        with self._precision():
            return scorer.scores(self._moved(layout.ids), index, tokens, {**arguments, **more})

    def _precision(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        if not self._casts:
            return nullcontext()
        return torch.autocast(self._device.type, self._dtype)

    def _moved(self, values: torch.Tensor) -> torch.Tensor:
        return moved(values, self._device)
