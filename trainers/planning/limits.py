"""Limits of the planner's work, in samples, rounds or shares, and what happens on both sides of each limit."""

import numpy as np

BALANCED_FIRST_SAMPLES = 256
"""Up to this many samples of an update are also balanced first and packed afterwards (Karmarkar-Karp). With more, swaps
alone end within 1e-4 of the mean, and differencing, which is quadratic in samples, costs more than it gains."""

LEVELLED_SHARES = (1.0, 0.6, 0.3, 0.0)
"""Shares of the samples, largest first, that worst fit places before best fit places the rest. The first share that
packs is used: a larger share gives bins of more equal fill, a smaller one packs tighter batches."""

SWAPPED_FIT_SAMPLES = 2048
"""Up to this many samples are swapped between bins if no fit packs them; with more, swaps rarely succeed."""

SUBSET_SUM_ITEMS = 64
"""Samples that are tried to fill one bin. More do not help: 64 samples have more sums than a bin has tokens."""

REPACKED_SHARE, MIN_REPACKED_BINS = 1 / 16, 4
"""If samples are left over, this share of the bins (the emptiest ones, and at least this number) is packed again.
If that fails too, every rank gets one more bin."""

CUT_SUBSET_SAMPLES = 10
"""Samples of a group that is cut between two ranks of which all subsets are tried: 2^10 sums."""

SWAP_ROUNDS = 8
"""Rounds of swaps between pairs of ranks. Plans of 16 ranks are even after two or three."""

SWAP_PARTNERS = np.arange(-4, 4)
"""Partners that are tried for a sample: the eight whose costs would make the two ranks most equal. A single one often
does not fit into the bin; sixteen take twice as long and gain nothing."""

SWAPPED_SAMPLES_PER_ROUND = 1024
"""Samples of the heavier ranks that one round considers (or 32 per rank, if that is more)."""

SWAPPED_SAMPLES, SWAPPED_SAMPLES_PER_RANK = 1024, 256
"""Samples among which swaps are chosen, in all or per rank, whichever is more. All of 262,144 would take ten times as
long for the same balance."""

MIN_GAIN = 1e-9
"""A swap must gain this share of the mean load. Less is rounding, and the search might never end."""

EVEN = 1e-5
"""Swaps end when the heaviest rank is within this share of the mean: step times vary a thousand times as much."""
