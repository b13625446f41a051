"""How weights travel from the trainer to the generators."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

State = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Sent:
    """One version, sent and not yet brought to anybody. `content` is the transport's own.

    `number` counts what a transport sent. `bytes` go to each receiver; `gather_s` is how long sending took. `twins` are
    further names of weights, each with the name under which they were sent.
    """

    content: Any
    number: int = 0
    bytes: int = 0
    gather_s: float = 0.0
    twins: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Offer:
    """What receivers open in one try to bring a version to them. `meets`: `serve` has to run meanwhile.

    `twins` are as in `Sent`; whoever receives has to add them.
    """

    content: Any
    number: int = 0
    meets: bool = False
    twins: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What loading took: to get the weights, to stage them beside generation, and without a token made; their size."""

    transfer_s: float
    stage_s: float = 0.0
    pause_s: float = 0.0
    staged_bytes: int = 0

    @classmethod
    def of(cls, transfer_s: float, update: Any) -> "Loaded":
        """Join what a generator says of its update, None if nothing, with the time before it."""
        if update is None:
            return cls(transfer_s)
        return cls(transfer_s, update.stage_s, update.pause_s, update.staged_bytes)


class WeightTransport(ABC):
    """`send` on a trainer rank gives what a publish brings to the collectors, which `receive` it.

    Invariant: what was sent is a copy of one whole version, and can be received until it is forgotten, however the
    trainer steps on. Sender and receivers hold a transport each, made alike. All but `receive` may block.
    """

    @abstractmethod
    def send(self, state: State) -> Sent:
        """Copy a version to where receivers will find it."""

    def offer(self, sent: Sent, receivers: Sequence[str], *, again: bool = False) -> Offer:
        """Make what was sent ready for one try with these receivers; `again` if the try before it failed."""
        return Offer(sent.content, sent.number)

    def serve(self, offer: Offer) -> None:  # noqa: B027 - Most senders have done all by then.
        """Bring an offer to receivers that meet the sender for it; Overdue if that fails."""

    def forget(self, sent: Sent) -> None:  # noqa: B027 - What is counted by references forgets by itself.
        """Let go of a version that everybody has; its number is not offered again."""

    @abstractmethod
    async def receive(self, offer: Offer) -> dict[str, torch.Tensor]:
        """Return the weights of an offer; they may share memory with others, so they are read only."""


class InProcess(WeightTransport):
    """The content is a copy of the weights."""

    def __init__(self) -> None:
        self._numbers = count()

    def send(self, state: State) -> Sent:
        copied = {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
        return Sent(copied, next(self._numbers), sum(tensor.nbytes for tensor in copied.values()))

    async def receive(self, offer: Offer) -> dict[str, torch.Tensor]:
        return dict(offer.content)
