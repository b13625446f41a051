"""Cosines and their like on a CPU: exact in every thread.

torch computes them with MKL, which finds out at its first call what the processor can do. Where several threads make
that call at once, some may take a function that is less exact: of half of a table of cosines, each is off by up to
1.5e-4. Seen with torch 2.13 and MKL 2024.2 in 4 of 60 processes with two threads; in none of 220 where one thread had
made a first call alone. A table of rotary positions stays wrong for the life of its process.
"""

import torch


def settle_vector_math() -> None:
    """Have MKL choose its functions, by a call that one thread makes. Do so before several threads compute."""
    torch.cos(torch.zeros(1))
