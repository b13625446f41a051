"""What the driver sends a rank for one stage of a step, and what comes back. Metadata only."""

import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from asyncrl.engine.records.columns import REFERENCE_LOGPROBS, TRAINER_LOGPROBS
from asyncrl.engine.records.plan import MicroBatch
from asyncrl.engine.records.traffic import Traffic

Stage = Literal["logprobs", "reference_logprobs", "train"]


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer update: how many of every rank's micro-batches, and trained tokens over all ranks.

    The loss of its tokens is divided by `tokens`.
    """

    micro_batches: int
    tokens: int


class SampleWork(NamedTuple):
    """What is to be done with one sample: its parts in tokens, and how much it counts.

    `response_tokens` are trained. The `withheld` leading ones are too old to be, and of the others those outside
    `generated` (records/generated.py; empty: none) were not made by the model. `advantage` carries the factor of the
    loss normalisation; `scale` is that factor alone, for loss terms that are not a multiple of it (None: nothing needs
    it). For example a prompt of 5 tokens, and a response of versions 3 (2 tokens) and 4 (5 tokens), at version 5 with
    `max_staleness` 1: prompt_tokens 5, withheld 2, response_tokens 5; with `generated` `0:3,5:7`, response_tokens 3.
    """

    key: str
    prompt_tokens: int
    response_tokens: int
    advantage: float
    withheld: int = 0
    scale: float | None = None
    generated: str = ""


@dataclass(frozen=True, slots=True)
class Work(ABC):
    """One rank's part of a stage's plan: micro-batches, and by key the samples in them.

    `total_tokens` is the number of trained tokens over all ranks. `pad_to` is the step's one forward length, in
    tokens (0: each micro-batch has its own).
    """

    step: int
    micro_batches: tuple[MicroBatch, ...]
    samples: Mapping[str, SampleWork]
    total_tokens: int
    pad_to: int = 0

    @property
    @abstractmethod
    def stage(self) -> Stage:
        """The name of the stage."""

    @property
    def digests(self) -> dict[str, int]:
        """The CRC-32 of each part of the work, the same on every platform: floats go in as their 64 bits."""
        samples = [self.samples[key] for key in sorted(self.samples)]
        batches = [f"{batch.filler:d}:{batch.tokens}:{','.join(batch.keys)}" for batch in self.micro_batches]
        counts, columns = self._own_parts()
        digests = {
            "micro_batches": zlib.crc32(";".join(batches).encode()),
            "advantages": _crc("d", [sample.advantage for sample in samples]),
            "scales": _crc("d", [sample.scale for sample in samples if sample.scale is not None]),
            "withheld": _crc("q", [sample.withheld for sample in samples]),
            "prompt_tokens": _crc("q", [sample.prompt_tokens for sample in samples]),
            "counts": _crc("q", [self.total_tokens, self.pad_to, *counts]),
            "columns": zlib.crc32(columns.encode()),
        }
        # Only where it says something: runs recorded before there were such tokens have no such part.
        if any(sample.generated for sample in samples):
            digests["generated"] = zlib.crc32(";".join(sample.generated for sample in samples).encode())
        return digests

    def sample_digests(self) -> dict[str, int]:
        """Return by key the CRC-32 of advantage, scale, tokens withheld and of the prompt, and places generated.

        Keys are sorted.
        """
        pack = struct.Struct("<ddqq").pack
        return {
            key: zlib.crc32(
                pack(one.advantage, 1.0 if one.scale is None else one.scale, one.withheld, one.prompt_tokens)
                + one.generated.encode()
            )
            for key, one in sorted(self.samples.items())
        }

    @abstractmethod
    def _own_parts(self) -> tuple[Sequence[int], str]:
        """Return what the kind of work adds to the digests of counts and of columns."""

    def __reduce__(self) -> Any:
        # Samples travel as columns in the order of their keys in the micro-batches: as records they took a third
        # more bytes, and three times as long to pickle.
        columns = tuple(zip(*(self.samples[key][1:] for key in _keys(self.micro_batches)), strict=True))
        values = [columns if one.name == "samples" else getattr(self, one.name) for one in fields(self)]
        return _unpickled, (type(self), *values)


def _unpickled(kind: type[Work], step: int, micro_batches: Any, columns: Any, *values: Any) -> Work:
    samples = map(SampleWork, _keys(micro_batches), *columns)
    return kind(step, micro_batches, {sample.key: sample for sample in samples}, *values)


def _keys(micro_batches: Sequence[MicroBatch]) -> list[str]:
    return list(dict.fromkeys(key for batch in micro_batches for key in batch.keys))


@dataclass(frozen=True, slots=True)
class TrainWork(Work):
    """Training: `updates` are the parts of `total_tokens`, in order of micro-batches (empty: one of all).

    `columns` are later columns that training reads beside what every put brings.
    """

    updates: tuple[Update, ...] = ()
    columns: tuple[str, ...] = ()

    @property
    def stage(self) -> Stage:
        return "train"

    @property
    def parts(self) -> tuple[Update, ...]:
        """The optimizer updates, also where there is one."""
        return self.updates or (Update(len(self.micro_batches), self.total_tokens),)

    def _own_parts(self) -> tuple[Sequence[int], str]:
        counts = [number for update in self.updates for number in (update.micro_batches, update.tokens)]
        return counts, f"0:{','.join(self.columns)}"


@dataclass(frozen=True, slots=True)
class ForwardWork(Work):
    """Log-probabilities alone, of the policy or of the frozen `reference`; with `write` kept as a column."""

    reference: bool = False
    write: bool = False

    @property
    def stage(self) -> Stage:
        return "reference_logprobs" if self.reference else "logprobs"

    @property
    def column(self) -> str:
        """The column that `write` leaves."""
        return REFERENCE_LOGPROBS if self.reference else TRAINER_LOGPROBS

    def _own_parts(self) -> tuple[Sequence[int], str]:
        return (), f"{self.write:d}:"


def _crc(code: str, values: Sequence[float]) -> int:
    return zlib.crc32(struct.pack(f"<{len(values)}{code}", *values))


@dataclass(frozen=True, slots=True)
class RankResult:
    """Sums over this rank's trained tokens; the loss is divided by each update's tokens and the number of updates.

    `grad_norm` is the mean over updates. `weight_sum` is of importance weights as they are, `used_weight_sum`
    as truncated, `truncated` how many were. `seconds` is what its micro-batches took, without waiting
    for rows (`waited_s`) or for other ranks. `entropy_sum` is of the policy, in nats.
    `peak_flops` is of its device in FLOPs per second, 0 if not known. `traffic` is what it read and wrote since its
    last result.
    """

    loss: float
    ratio_sum: float
    clipped: int
    kl_sum: float
    tokens: int
    grad_norm: float
    seconds: float = 0.0
    waited_s: float = 0.0
    weight_sum: float = 0.0
    used_weight_sum: float = 0.0
    truncated: int = 0
    reference_kl_sum: float = 0.0
    peak_flops: float = 0.0
    entropy_sum: float = 0.0
    learning_rate: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)
