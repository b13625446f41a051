"""What the driver sends a rank for one stage of a step, and what comes back. Metadata only."""

import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from asyncrl.engine.records.plan import MicroBatch

Stage = Literal["logprobs", "reference_logprobs", "train"]


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer update: how many of every rank's micro-batches, and trained tokens over all ranks.

    The loss of its tokens is divided by `tokens`.
    """

    micro_batches: int
    tokens: int


@dataclass(frozen=True, slots=True)
class RankWork:
    """One rank's part of a plan; by key its advantage, prompt tokens, and leading response tokens withheld.

    `advantages` carry the scale of the loss normalisation; `scales` are that factor alone, by key, for loss terms
    that are not a multiple of the advantage (empty: 1 everywhere). `total_tokens` is the number of trained tokens
    over all ranks, and `updates` its parts in order of micro-batches (empty: one of all). `columns` are later columns
    that the stage reads beside what every put brings. A forward-only stage leaves its result as the column of its
    stage where `write` holds. `pad_to` is the step's one forward length, in tokens (0: each micro-batch has its own).
    """

    step: int
    micro_batches: tuple[MicroBatch, ...]
    advantages: Mapping[str, float]
    prompt_tokens: Mapping[str, int]
    withheld: Mapping[str, int]
    total_tokens: int
    stage: Stage = "train"
    updates: tuple[Update, ...] = ()
    scales: Mapping[str, float] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    write: bool = False
    pad_to: int = 0

    @property
    def parts(self) -> tuple[Update, ...]:
        """The optimizer updates, also where there is one."""
        return self.updates or (Update(len(self.micro_batches), self.total_tokens),)

    @property
    def digests(self) -> dict[str, int]:
        """The CRC-32 of each part of the work, the same on every platform: floats go in as their 64 bits."""
        keys = sorted(self.prompt_tokens)
        batches = [f"{batch.filler:d}:{batch.tokens}:{','.join(batch.keys)}" for batch in self.micro_batches]
        updates = [number for update in self.updates for number in (update.micro_batches, update.tokens)]
        return {
            "micro_batches": zlib.crc32(";".join(batches).encode()),
            "advantages": _of_floats(self.advantages[key] for key in keys),
            "scales": _of_floats(self.scales[key] for key in keys if key in self.scales),
            "withheld": _of_integers(self.withheld[key] for key in keys),
            "prompt_tokens": _of_integers(self.prompt_tokens[key] for key in keys),
            "counts": _of_integers([self.total_tokens, self.pad_to, *updates]),
            "columns": zlib.crc32(f"{self.write:d}:{','.join(self.columns)}".encode()),
        }

    def sample_digests(self) -> dict[str, int]:
        """Return by key the CRC-32 of advantage, scale, and tokens withheld and of the prompt; keys are sorted."""
        pack = struct.Struct("<ddqq").pack
        return {
            key: zlib.crc32(pack(self.advantages[key], self.scales.get(key, 1.0), self.withheld[key], prompt))
            for key, prompt in sorted(self.prompt_tokens.items())
        }


def _of_floats(values: Iterable[float]) -> int:
    given = list(values)
    return zlib.crc32(struct.pack(f"<{len(given)}d", *given))


def _of_integers(values: Iterable[int]) -> int:
    given = list(values)
    return zlib.crc32(struct.pack(f"<{len(given)}q", *given))


@dataclass(frozen=True, slots=True)
class RankResult:
    """Sums over this rank's trained tokens; the loss is divided by each update's tokens and the number of updates.

    `grad_norm` is the mean over updates. `weight_sum` is of importance weights as they are, `used_weight_sum`
    as truncated, `truncated` how many were. `seconds` is what its micro-batches took, without waiting
    for rows (`waited_s`) or for other ranks. `peak_flops` is of its device in FLOPs per second, 0 if not known.
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
