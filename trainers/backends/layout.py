"""Where the samples of a micro-batch stand in a forward pass, and which of its positions predict what is trained.

Positions of all rows are counted in one, row by row: of a pass (B, L) the token t of row b is at b L + t. One index
so does for padded and packed samples, and what goes to a GPU goes in one piece.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from asyncrl.engine.errors import AsyncRLError
from asyncrl.trainers.backends.packing import Packing

_LONG = 1024
_LITTLE_PADDING = 1 / 64


@dataclass(frozen=True, slots=True)
class Layout:
    """Ids of a forward pass (B, L), where each sample starts, and how many tokens it has, all on the CPU.

    Packed samples are in one row, which `packing` divides.
    """

    ids: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    packing: Packing | None = None

    @classmethod
    def padded(cls, tokens: Sequence[torch.Tensor], *, pad_id: int, align: int = 1, pad_to: int = 0) -> "Layout":
        """Give each sample a row of the longest one's length in multiples of `align`, or of `pad_to`."""
        lengths = _lengths(tokens)
        longest = int(lengths.max())
        length = pad_to or _aligned(longest, align)
        if longest > length:
            raise AsyncRLError(f"a sample has {longest} tokens, over the common length of {length}")
        starts = torch.arange(len(tokens)) * length
        ids = _filled(tokens, starts, lengths, len(tokens) * length, pad_id)
        return cls(ids.reshape(len(tokens), length), starts, lengths)

    @classmethod
    def packed(cls, tokens: Sequence[torch.Tensor], *, pad_id: int, align: int = 1, pad_to: int = 0) -> "Layout":
        """Put all samples into one row, each in a multiple of `align` positions; the rest of `pad_to` is more of them.

        Of that none is longer than the longest sample: a model may have no more positions, and where the longest of a
        pass changes the rotations of all, padding must not be it.
        """
        lengths = _lengths(tokens)
        taken = -(-lengths // align) * align
        total = int(taken.sum())
        starts = taken.cumsum(0) - taken
        ids = _filled(tokens, starts, lengths, max(total, pad_to), pad_id)
        longest, gap = int(taken.max()), max(0, pad_to - total)
        rest = [min(longest, gap - at) for at in range(0, gap, longest)]
        return cls(ids.unsqueeze(0), starts, lengths, Packing([*taken.tolist(), *rest]))

    def attention(self) -> torch.Tensor:
        """Return which positions of padded rows hold tokens: (B, L), 1 or 0."""
        return (torch.arange(self.ids.shape[1]) < self.lengths.unsqueeze(1)).long()

    def predictors(self, prompt_tokens: Sequence[int]) -> torch.Tensor:
        """Return the positions whose outputs predict the responses, sample by sample: (tokens of all responses).

        The output at a prompt's last token predicts the first token of the response. Two padded samples of
        3 + 2 and 1 + 1 tokens, in rows of 5: [2, 3, 5].
        """
        prompts = torch.tensor(prompt_tokens)
        return runs(self.starts + prompts - 1, self.lengths - prompts)

    def predicted(self, prompt_tokens: Sequence[int]) -> torch.Tensor:
        """Return the responses' ids, sample by sample (tokens of all responses)."""
        return self.ids.flatten()[self.predictors(prompt_tokens) + 1]

    def responses(self, prompt_tokens: Sequence[int]) -> list[int]:
        """Return how many tokens each response has."""
        return (self.lengths - torch.tensor(prompt_tokens)).tolist()


def suits_rows(tokens: Sequence[torch.Tensor]) -> bool:
    """Return whether samples are long, and padded rows of them would have next to no padding: 1/64 of the tokens.

    Attention over padded rows has the faster kernel where there is one for packed rows: forward and backward in 0.6 of
    the time on an H200. Below 1,024 tokens attention is too small a part of a step for that to be seen.
    """
    lengths = _lengths(tokens)
    longest, total = int(lengths.max()), int(lengths.sum())
    return longest >= _LONG and longest * len(tokens) <= total * (1 + _LITTLE_PADDING)


def runs(starts: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return `counts` integers from each of `starts` on: [2, 10] and [3, 1] give [2, 3, 4, 10]."""
    before = counts.cumsum(0) - counts
    return torch.from_numpy(np.repeat((starts - before).numpy(), counts.numpy())).add_(torch.arange(int(counts.sum())))


def _lengths(tokens: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([row.shape[0] for row in tokens])


def _aligned(tokens: int, align: int) -> int:
    return -(-tokens // align) * align


def _filled(
    tokens: Sequence[torch.Tensor], starts: torch.Tensor, lengths: torch.Tensor, total: int, pad_id: int
) -> torch.Tensor:
    """Return ids (total): the samples where they start, and padding elsewhere."""
    ids = torch.full((total,), pad_id)
    ids[runs(starts, lengths)] = torch.cat(list(tokens)).long()
    return ids
