"""What differs between two versions, by words of two bytes.

Small blocks matter: after a step with a small learning rate one weight in a hundred of a bfloat16 model is another, so
that nearly every block of some kilobytes has a change in it.
"""

import torch

from asyncrl.engine.weights.base import State

_PAGE_BITS = 16
_PAGE_WORDS = 1 << _PAGE_BITS
"""A change's place within a page fits into two bytes."""
_MAX_SHARE = 0.5
"""If changes take more than this share of the whole, the whole is sent: it is patched faster than it is made."""


def find_changes(base: torch.Tensor, flat: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """Return what makes `flat` of `base`, both uint8 (bytes,) with an even number; None if it is not worth it.

    Per page of 65,536 words the number of changes, and per change its place in its page and its word: 4 bytes per
    change. Of 1,000 words in which the 2nd and the 7th differ: counts [2], places [1, 6].
    """
    before, words = base.view(torch.int16), flat.view(torch.int16)
    differ = words != before
    if 4 * int(torch.count_nonzero(differ)) > _MAX_SHARE * flat.numel():
        return None
    at = torch.nonzero(differ).squeeze(1)
    pages = -(-words.numel() // _PAGE_WORDS)
    return {
        "counts": torch.bincount(at >> _PAGE_BITS, minlength=pages).to(torch.int32),
        # The upper half of the places wraps to negative numbers, and back where they are read.
        "places": (at & (_PAGE_WORDS - 1)).to(torch.int16),
        "words": words[at],
    }


def apply_changes(base: torch.Tensor, changes: State) -> torch.Tensor:
    """Return a changed copy of `base`, uint8 (bytes,)."""
    counts = changes["counts"].to(torch.int64)
    pages = torch.arange(counts.numel(), device=counts.device) << _PAGE_BITS
    at = torch.repeat_interleave(pages, counts) + (changes["places"].to(torch.int64) & (_PAGE_WORDS - 1))
    flat = base.clone()
    flat.view(torch.int16)[at] = changes["words"]
    return flat
