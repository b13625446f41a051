"""What the device knows of each slot's row: its last token, where it is, when it ends, and how it is sampled.

Two tensors, integers and floats, one line per slot, so that seating or moving a row is two copies.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from asyncrl.collectors.engines.base import Sampling
from asyncrl.collectors.engines.sampler import uniform

MAX_STOP_IDS = 16
_TOKEN, _POSITION, _MADE, _LIMIT, _OPEN, _TOP_K, _STOPS = range(7)
_TEMPERATURE, _TOP_P, _MIN_P, _DRAWS = range(4)


@dataclass(frozen=True, slots=True)
class Seat:
    """One row to come: its last token, that token's position, how many tokens it has made, and how it is sampled."""

    slot: int
    token: int
    position: int
    made: int
    sampling: Sampling
    seed: int


class Rows:
    """`slots` rows, each with at most `length` tokens to make."""

    def __init__(self, slots: int, length: int, device: torch.device) -> None:
        self._device = device
        self._ints = torch.zeros(slots, _STOPS + MAX_STOP_IDS, dtype=torch.int64, device=device)
        self._floats = torch.ones(slots, _DRAWS + length, dtype=torch.float32, device=device)

    def seat(self, seats: Sequence[Seat]) -> None:
        """Write these rows; each is open."""
        ints = np.full((len(seats), _STOPS + MAX_STOP_IDS), -1, dtype=np.int64)
        floats = np.zeros((len(seats), _DRAWS + max(seat.sampling.max_new_tokens for seat in seats)), dtype=np.float32)
        for i, seat in enumerate(seats):
            sampling = seat.sampling
            # The likeliest token is the one that is left of the distribution's first.
            greedy = sampling.temperature == 0
            top_k = 1 if greedy else sampling.top_k
            ints[i, :_STOPS] = (seat.token, seat.position, seat.made, sampling.max_new_tokens, 1, top_k)
            ints[i, _STOPS : _STOPS + len(sampling.stop_ids)] = sampling.stop_ids
            floats[i, :_DRAWS] = (1.0 if greedy else sampling.temperature, sampling.top_p, sampling.min_p)
            floats[i, _DRAWS : _DRAWS + sampling.max_new_tokens] = uniform(seat.seed, sampling.max_new_tokens)
        slots = self.send(np.array([seat.slot for seat in seats]))
        self._ints[slots] = self.send(ints)
        self._floats[slots, : floats.shape[1]] = self.send(floats)

    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy rows to slots that are none of them."""
        self._ints[targets] = self._ints[sources]
        self._floats[targets] = self._floats[sources]

    def send(self, array: "np.ndarray[tuple[int, ...], np.dtype[np.int64 | np.float32]]") -> torch.Tensor:
        """Bring an array to the device, without waiting for it."""
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor

    def save(self) -> torch.Tensor:
        """Return what passes change, for `restore`."""
        return self._ints.clone()

    def restore(self, saved: torch.Tensor) -> None:
        """Make rows what they were when saved."""
        self._ints.copy_(saved)

    def tokens(self, rows: int) -> torch.Tensor:
        """Return the last tokens (rows,), which the next pass takes."""
        return self._ints[:rows, _TOKEN]

    def positions(self, rows: int) -> torch.Tensor:
        """Return the last tokens' positions (rows,)."""
        return self._ints[:rows, _POSITION]

    def open(self, rows: int) -> torch.Tensor:
        """Return which rows (rows,) are still to make tokens, 1 or 0."""
        return self._ints[:rows, _OPEN]

    def draws(self, rows: int) -> torch.Tensor:
        """Return the number (rows,) that decides each row's next token."""
        made = self._ints[:rows, _MADE, None].clamp(max=self._floats.shape[1] - _DRAWS - 1)
        return self._floats[:rows, _DRAWS:].gather(1, made)[:, 0]

    def temperature(self, rows: int) -> torch.Tensor:
        """Return temperatures (rows,), above 0."""
        return self._floats[:rows, _TEMPERATURE]

    def limits(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return top-k, top-p and min-p, each (rows,)."""
        return self._ints[:rows, _TOP_K], self._floats[:rows, _TOP_P], self._floats[:rows, _MIN_P]

    def advance(self, chosen: torch.Tensor) -> torch.Tensor:
        """Give open rows `chosen` (rows,) as next tokens, close those that end; return tokens, -1 of closed rows."""
        rows = self._ints[: len(chosen)]
        was_open = rows[:, _OPEN].clone()
        stopped = (chosen[:, None] == rows[:, _STOPS:]).any(1)
        rows[:, _TOKEN] = torch.where(was_open == 1, chosen, rows[:, _TOKEN])
        rows[:, _POSITION] += was_open
        rows[:, _MADE] += was_open
        ended = stopped | (rows[:, _MADE] >= rows[:, _LIMIT])
        rows[:, _OPEN] *= 1 - ended.long()
        return torch.where(was_open == 1, chosen, -1)
