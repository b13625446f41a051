"""What bounds the planner's work, in samples, rounds or shares; and what happens on both sides of each bound."""

import numpy as np

BALANCED_FIRST_SAMPLES = 256
"""Up to so many samples of an update are also balanced first and packed after (Karmarkar-Karp). With more, swaps
alone end within 1e-4 of the mean, and differencing, which is quadratic in samples, costs more than it buys."""

LEVELLED_SHARES = (1.0, 0.6, 0.3, 0.0)
"""Shares of the samples, from the largest, that worst fit places before best fit places the rest. The first share
that packs is taken: a larger one gives bins of more equal fill, a smaller one packs tighter batches."""

SWAPPED_FIT_SAMPLES = 2048
"""Up to so many samples are swapped between bins where no fit packs them; swaps of more rarely succeed."""

SUBSET_SUM_ITEMS = 64
"""Samples that are tried to fill one bin. More fill it no better: 64 samples make more sums than a bin has tokens."""

REPACKED_SHARE, MIN_REPACKED_BINS = 1 / 16, 4
"""Where samples are left over, this share of the bins, the emptiest, and at least so many, is packed anew. Only if
that fails too is another row of bins opened."""

CUT_SUBSET_SAMPLES = 10
"""Samples of a group on the cut between two ranks of which every subset is tried: 2^10 sums."""

SWAP_ROUNDS = 8
"""Rounds of swaps between pairs of ranks. Plans of 16 ranks are even after two or three."""

SWAP_PARTNERS = np.arange(-4, 4)
"""Partners that a sample is tried against: the eight whose costs are nearest to what makes the pair of ranks equal.
One alone often does not fit its bin; sixteen take twice as long and gain nothing."""

SWAPPED_SAMPLES_PER_ROUND = 1024
"""Samples of the heavier ranks that one round looks at (32 per rank where that is more)."""

SWAPPED_SAMPLES, SWAPPED_SAMPLES_PER_RANK = 1024, 256
"""Samples among which swaps are chosen, in all or per rank, whichever is more. All of 262,144 would take ten times as
long for the same balance."""

MIN_GAIN = 1e-9
"""A swap must gain this share of the mean load. Less is rounding, and would let a search go on for ever."""

EVEN = 1e-5
"""The heaviest rank is even enough within this share of the mean: a step's time varies a thousand times as much."""
