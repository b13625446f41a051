"""Prompts in order: each epoch is all prompts, shuffled by (seed, epoch)."""

import random
from collections.abc import Iterator, Sequence

from asyncrl.engine.records import Prompt


def prompt_source(prompts: Sequence[Prompt], *, seed: int, epochs: int | None) -> Iterator[Prompt]:
    """Yield prompts for `epochs` passes, or without end for None."""
    epoch = 0
    while prompts and (epochs is None or epoch < epochs):
        order = list(prompts)
        random.Random(f"{seed}/{epoch}").shuffle(order)
        yield from order
        epoch += 1
