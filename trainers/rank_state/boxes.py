"""Parts of a tensor, checked to be all of it: each element is in one part."""

import math
from collections.abc import Sequence

from asyncrl.engine.bounds import MOST_DIMENSIONS
from asyncrl.trainers.rank_state.index import Part

_MOST_PARTS = 4096
"""Most parts of a tensor: some are compared with all others. A tensor of 16 TB has as many files."""

Shape = tuple[int, ...]


def what_is_wrong(shape: Shape, parts: Sequence[Part]) -> str | None:
    """Return why the parts are not the whole tensor; None if they are.

    (4, 5) is whole as rows 0 to 2 and row 3. It is not whole as rows 0 to 2 and 2 to 3, nor as rows 0 to 2 alone.
    """
    if len(shape) > MOST_DIMENSIONS or len(parts) > _MOST_PARTS:
        return f"it has {len(shape):,} dimensions and {len(parts):,} parts"
    if any(size < 0 for size in shape):
        return f"its shape is {list(shape)}"
    for part in parts:
        if not _inside(shape, part):
            return f"{part.file} has a part at {list(part.offsets)} of shape {list(part.shape)}, of {list(shape)}"
    full = [part for part in parts if math.prod(part.shape)]
    covered = sum(math.prod(part.shape) for part in full)
    if covered < math.prod(shape):
        return f"its parts have {covered} of {math.prod(shape)} elements"
    # Boxes that have as many elements as the tensor, and of which no two overlap, are all of it.
    full.sort(key=lambda part: part.offsets)
    for i, part in enumerate(full):
        for other in full[i + 1 :]:
            if shape and other.offsets[0] >= part.offsets[0] + part.shape[0]:
                break
            if _overlap(part, other):
                return f"its parts at {list(part.offsets)} and {list(other.offsets)} overlap"
    return None


def _inside(shape: Shape, part: Part) -> bool:
    return len(part.offsets) == len(part.shape) == len(shape) and all(
        offset >= 0 and size >= 0 and offset + size <= whole
        for offset, size, whole in zip(part.offsets, part.shape, shape, strict=True)
    )


def _overlap(one: Part, other: Part) -> bool:
    """Two parts that are not empty overlap if they do along every dimension; of a scalar there is one element."""
    return all(
        a < b + size_b and b < a + size_a
        for a, size_a, b, size_b in zip(one.offsets, one.shape, other.offsets, other.shape, strict=True)
    )
