"""Training with megatron-core: a part of a replica per rank, AdamW sharded over data parallel ranks."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.engine.errors import AsyncRLError
from asyncrl.engine.records.columns import ROUTED_EXPERTS
from asyncrl.engine.weights.base import State
from asyncrl.engine.weights.twins import with_twins
from asyncrl.trainers.backends.base import DeviceSums, Rows, TrainingState
from asyncrl.trainers.backends.chosen import Scores
from asyncrl.trainers.backends.layout import Layout, suits_rows
from asyncrl.trainers.backends.megatron.architecture import check_model, check_split, routing
from asyncrl.trainers.backends.megatron.cpu import on_device, prepare
from asyncrl.trainers.backends.megatron.passes import Outcome, Pass
from asyncrl.trainers.backends.megatron.pieces import in_pieces
from asyncrl.trainers.backends.megatron.settings import MegatronSettings
from asyncrl.trainers.backends.packing import has_varlen
from asyncrl.trainers.backends.rows_loss import SUMS, device_sums, loss_values, rows_loss
from asyncrl.trainers.backends.trained import trained_flags
from asyncrl.trainers.rank_state.saved import SavedState

MOMENTS = ("exp_avg", "exp_avg_sq")


class MegatronBackend:
    """`config` is a transformers model's, `weights` its state by its names, of which each rank takes its part.

    The process group must have been joined, and all ranks build their backends at the same time. Ranks of one replica
    are siblings: they call every method together, with equal rows, and get equal results. `gradients`, `apply`,
    `training_state` and `load_training_state` are called by all ranks together, and with experts split over ranks
    every pass is. Gradients are summed by megatron: `gradients` returns no element, and `apply` needs none.
    ConfigError for a model that megatron cannot represent exactly, or that cannot be split so.
    """

    def __init__(
        self,
        config: Any,
        weights: Mapping[str, torch.Tensor],
        settings: MegatronSettings,
        *,
        pad_id: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        check_model(config)
        check_split(config, settings.split, dist.get_world_size())
        self._routing = routing(config) if settings.router_replay else None
        prepare()
        from asyncrl.trainers.backends.megatron.replica import Replica  # It imports megatron.

        self._settings = settings
        self._dtype = dtype
        self._device = device
        self._pad_id = pad_id
        self._varlen = settings.packed and has_varlen(device, dtype)
        self._twins = {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {}
        with on_device(self._device):
            self._replica = Replica(config, weights, settings, device=device, dtype=dtype)
        self.freeze_reference()

    def freeze_reference(self) -> None:
        if self._settings.reference_kl:
            with on_device(self._device):
                self._replica.freeze_reference()

    def reset_optimizer(self) -> None:
        self._replica.reset_optimizer()

    @property
    def sums_gradients(self) -> bool:
        return True

    def accumulate(self, rows: Rows, total_tokens: int) -> DeviceSums:
        settings = self._settings

        def finish(piece: Rows, layout: Layout, hidden: torch.Tensor) -> Outcome:
            chosen = trained_flags(piece)
            counts = layout.responses(piece.prompt_tokens)
            scores = self._scores(piece, layout, hidden, chosen)
            values = loss_values(
                piece,
                chosen,
                counts,
                reference=settings.reference_kl > 0,
                dtype=scores.logprobs.dtype,
                device=scores.logprobs.device,
            )
            sums = rows_loss(
                values,
                scores.logprobs,
                clip=settings.clip,
                importance_cap=settings.importance_cap,
                reference_kl=settings.reference_kl,
            )
            loss = sums.loss / max(total_tokens, 1)
            return loss, device_sums(loss, sums, scores.entropies)

        return DeviceSums(torch.stack(self._run(rows, finish, lambda _: SUMS)).sum(0))

    @torch.no_grad()
    def logprobs(self, rows: Rows, *, reference: bool = False) -> list[torch.Tensor]:
        def finish(piece: Rows, layout: Layout, hidden: torch.Tensor) -> Outcome:
            logprobs = self._scores(piece, layout, hidden, reference=reference).logprobs
            return logprobs.sum(), logprobs

        found = self._run(rows, finish, lambda piece: sum(_counts(piece)), reference=reference)
        return list(torch.split(torch.cat(found).float().cpu(), _counts(rows)))

    def accumulate_supervised(self, tokens: Sequence[torch.Tensor], prompt_tokens: Sequence[int], total: int) -> float:
        def finish(piece: Rows, layout: Layout, hidden: torch.Tensor) -> Outcome:
            loss = -self._scores(piece, layout, hidden).logprobs.sum() / max(total, 1)
            return loss, loss.reshape(1)

        rows = Rows(tokens, (), prompt_tokens, (), (), filler=False)
        return float(torch.cat(self._run(rows, finish, lambda _: 1)).sum())

    def gradients(self) -> torch.Tensor:
        with on_device(self._device):
            self._replica.sum_gradients()
        return torch.zeros(0)

    def apply(self, gradients: torch.Tensor, *, learning_rate: float) -> float:
        with on_device(self._device):
            return self._replica.step(learning_rate=learning_rate)

    def state(self) -> State:
        """Return the whole weights in the dtype of computation, on every rank of the replica; tied ones are one."""
        with on_device(self._device):
            return with_twins(dict(self._replica.state()), self._twins)

    def buckets(self) -> Iterator[State]:
        yield self.state()

    def sleep(self) -> None:
        raise AsyncRLError("weights of megatron-core do not leave their device; cluster.time_slicing must be null")

    def wake(self) -> None:
        """Do nothing: it never sleeps."""

    def training_state(self) -> TrainingState:
        """Return copies in the host's memory on rank 0, which alone saves them, and a scalar on the others.

        Masters and moments are whole and have the PyTorch backend's names, so that they can be read in any split.
        """
        replica = self._replica
        updates = torch.tensor(float(replica.updates))
        with on_device(self._device):
            tensors = _on_host("weights/", replica.masters("weights"))
            if replica.updates:
                tensors |= {f"optimizer/step/{name}": updates.clone() for name in replica.shapes}
                for key in MOMENTS:
                    tensors |= _on_host(f"optimizer/{key}/", replica.masters(key))
            constant = _on_host("reference/", replica.reference()) if self._settings.reference_kl else {}
        if dist.get_rank():
            return TrainingState({"updates": updates}, {}, {}, self._device)
        return TrainingState(tensors, constant, {}, self._device)

    def load_training_state(self, saved: SavedState) -> None:
        replica = self._replica
        shapes = replica.shapes
        moments = any(name.startswith("optimizer/") for name in saved.names)
        expected = _named("weights/", shapes, torch.float32)
        if moments:
            for key in MOMENTS:
                expected |= _named(f"optimizer/{key}/", shapes, torch.float32)
            expected |= _named("optimizer/step/", dict.fromkeys(shapes, torch.Size()), torch.float32)
        if self._settings.reference_kl:
            expected |= _named("reference/", shapes, self._dtype)
        saved.check(expected, {})

        def read(name: str) -> torch.Tensor:
            found = torch.empty_like(expected[name], device="cpu")
            saved.read_into(name, found)
            return found

        def read_by_key(key: str, name: str) -> torch.Tensor:
            return read(f"weights/{name}" if key == "weights" else f"optimizer/{key}/{name}")

        updates = int(read(f"optimizer/step/{next(iter(shapes))}")) if moments else 0
        with on_device(self._device):
            replica.load(read_by_key, updates=updates)
            if self._settings.reference_kl:
                replica.load_reference(lambda name: read(f"reference/{name}"))

    def _run(
        self,
        rows: Rows,
        finish: Callable[[Rows, Layout, torch.Tensor], Outcome],
        size: Callable[[Rows], int],
        *,
        reference: bool = False,
    ) -> list[torch.Tensor]:
        """Pass rows through the model, in pieces if it is a pipeline, and return what `finish` told of each piece."""
        split = self._settings.split
        # With experts split over data parallel ranks these need equally many passes, whatever their rows.
        pieces = in_pieces(rows, 2 * split.pipeline if split.pipeline > 1 and split.expert == 1 else 1)
        passes = []
        for piece in pieces:
            # Rows are faster where they have no padding; stages of a pipeline expect pieces of one kind.
            rows_too = self._varlen and split.pipeline == 1 and not piece.pad_to and suits_rows(piece.tokens)
            place = Layout.packed if self._settings.packed and not rows_too else Layout.padded
            layout = place(piece.tokens, pad_id=self._pad_id, align=self._settings.align, pad_to=piece.pad_to)
            # The frozen model chooses by itself.
            routed = None if reference or self._routing is None else piece.extras.get(ROUTED_EXPERTS)
            experts = self._routing.placed(routed, layout) if self._routing is not None and routed is not None else None
            passes.append(Pass(layout, experts, partial(finish, piece, layout), size(piece)))
        with on_device(self._device):
            return self._replica.run(passes, reference=reference)

    def _scores(
        self,
        rows: Rows,
        layout: Layout,
        hidden: torch.Tensor,
        chosen: torch.Tensor | None = None,
        *,
        reference: bool = False,
    ) -> Scores:
        """Return scores of the responses' tokens, or of those that are chosen."""
        index, tokens = layout.predictors(rows.prompt_tokens), layout.predicted(rows.prompt_tokens)
        if chosen is not None:
            index, tokens = index[chosen], tokens[chosen]
        return self._replica.scores(hidden, layout, index, tokens, reference=reference)


def _counts(rows: Rows) -> list[int]:
    """Return how many tokens each response has."""
    return [ids.shape[0] - prompt for ids, prompt in zip(rows.tokens, rows.prompt_tokens, strict=True)]


def _named(prefix: str, shapes: Mapping[str, torch.Size], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {prefix + name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}


def _on_host(prefix: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Keep whole tensors on rank 0; the others take part in joining them."""
    keeps = dist.get_rank() == 0
    return {prefix + name: value.cpu() for name, value in tensors if keeps}
