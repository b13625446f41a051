"""What a trainer rank asks of a backend: log-probabilities, gradients in pieces, then one update."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Protocol

import torch

from asyncrl.engine.weights.base import State

if TYPE_CHECKING:
    from asyncrl.trainers.rank_state.saved import SavedState


@dataclass(frozen=True, slots=True)
class Rows:
    """A micro-batch of B samples: ids (L_i), behaviour log-probabilities (response_i), advantages.

    The first `withheld` tokens of a response are only context, because they are too old to be trained on, and so are
    those that the model did not generate.
    A filler's rows go through the model and add nothing. Tensors may be views of shared memory: never write to them.

    proximal_logprobs: of the policy at the start of the batch (response_i); None: the behaviour's are used.
    reference_logprobs: of the frozen reference model (response_i); None: there is no such model.
    scales: by sample, the factor of the loss normalisation for its tokens; None: 1.
    pad_to: the forward length in tokens, common to all ranks of the step; 0: the micro-batch's own.
    extras: further tensor columns of the partition (such as images), one tensor per sample.
    generated: by sample, the places of generated tokens as text (records/generated.py); empty or None: all.
    last: whether the update comes next; ranks that sum gradients in a backward pass do so in this one alone.
    """

    tokens: Sequence[torch.Tensor]
    logprobs: Sequence[torch.Tensor]
    prompt_tokens: Sequence[int]
    advantages: Sequence[float]
    withheld: Sequence[int]
    filler: bool
    proximal_logprobs: Sequence[torch.Tensor] | None = None
    reference_logprobs: Sequence[torch.Tensor] | None = None
    scales: Sequence[float] | None = None
    pad_to: int = 0
    extras: Mapping[str, Sequence[torch.Tensor]] = field(default_factory=dict)
    generated: Sequence[str] | None = None
    last: bool = True


@dataclass(slots=True)
class StepSums:
    """Sums over trained tokens so far; `loss` is divided by the tokens of its update, `entropy` is in nats."""

    loss: float = 0.0
    ratio: float = 0.0
    clipped: int = 0
    kl: float = 0.0
    tokens: int = 0
    weight: float = 0.0
    used_weight: float = 0.0
    truncated: int = 0
    reference_kl: float = 0.0
    entropy: float = 0.0

    def add(self, other: "StepSums") -> None:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


@dataclass(frozen=True, slots=True)
class DeviceSums:
    """The fields of StepSums, in their order, of one micro-batch: float64 (10,), on the device that computes them."""

    values: torch.Tensor

    def read(self) -> StepSums:
        """Wait until the device has them, and return them."""
        found = zip(fields(StepSums), self.values.tolist(), strict=True)
        return StepSums(**{one.name: int(value) if isinstance(one.default, int) else value for one, value in found})


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a whole tensor of this shape a rank's part begins, and whether this rank is the one that saves it.

    Of a (5, 3) tensor on two ranks the second has two rows: shape (5, 3), offsets (3, 0).
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    saves: bool = True


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Live tensors by name: training changes `tensors`; `constant` ones it reads; `frozen` ones are the loaded model's.

    For example `weights/lm_head.weight` and `optimizer/exp_avg/lm_head.weight` change. `reference/lm_head.weight` is
    constant after the warm-up: it is saved from where it is, without a copy. Frozen ones are not saved. `device` is
    where training runs, also while the tensors are elsewhere. `places` are those of parts, by name; every other tensor
    is whole, and equal on all ranks.
    """

    tensors: Mapping[str, torch.Tensor]
    constant: Mapping[str, torch.Tensor]
    frozen: Mapping[str, torch.Tensor]
    device: torch.device
    places: Mapping[str, Place] = field(default_factory=dict)

    @property
    def saved(self) -> Mapping[str, torch.Tensor]:
        """What a saved state consists of."""
        return {**self.tensors, **self.constant}


class Stateful(Protocol):
    """What can be saved, and continued."""

    def training_state(self) -> TrainingState:
        """Return what the next update depends on: weights in their own type, the optimizer's, the reference."""

    def load_training_state(self, saved: "SavedState") -> None:
        """Continue from a saved state; CheckpointBroken if it is of another model or of other options."""


class Backend(Stateful, Protocol):
    """A replica of the model with its optimizer, or a part of one.

    Ranks that hold parts of one replica are called alike, each for as many passes as the others.
    """

    @property
    def sums_gradients(self) -> bool:
        """Whether `gradients` are sums over all ranks already."""

    def accumulate(self, rows: Rows, total_tokens: int) -> DeviceSums:
        """Add the gradient of this micro-batch's loss sum / `total_tokens`; return its sums.

        A GPU may still be at it. Sums that are read before the next micro-batch is given keep the GPU waiting for it.
        """

    def logprobs(self, rows: Rows, *, reference: bool = False) -> list[torch.Tensor]:
        """Return per sample the log-probabilities of its response (response_i), without gradient.

        They are of the policy or of the frozen reference model. Only ids, prompt lengths and extras are used.
        """

    def accumulate_supervised(self, tokens: Sequence[torch.Tensor], prompt_tokens: Sequence[int], total: int) -> float:
        """Add the gradient of the negative log-likelihood of the answers / `total` tokens; return its part."""

    def gradients(self) -> torch.Tensor:
        """Return all accumulated gradients of this rank's weights as one flat tensor, and forget them."""

    def apply(self, gradients: torch.Tensor, *, learning_rate: float) -> float:
        """Clip summed gradients to the maximal norm, update the weights; return the norm before clipping."""

    def reset_optimizer(self) -> None:
        """Forget the optimizer's moments (after the warm-up)."""

    def freeze_reference(self) -> None:
        """Give the reference model, if there is one, the current weights."""

    def state(self) -> State:
        """Return the weights to publish, whole."""

    def buckets(self) -> Iterator[State]:
        """Yield the weights to publish, some at a time: of parts, each is whole only until the next one is asked for.

        While rank 0 asks for `state`, the others with parts of its replica go through all buckets.
        """

    def sleep(self) -> None:
        """Move all weights, masters and what the optimizer keeps to the host's memory, between two steps.

        Until `wake` only `state` and `training_state` may be asked for; their tensors are then in the host's memory.
        """

    def wake(self) -> None:
        """Bring everything back to the device."""
