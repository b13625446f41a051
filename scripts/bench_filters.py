"""How long filters take for 1,000,000 samples (125,000 groups of 8), in columns and group by group.

From tags as the data plane returns them to verdicts with reasons, counts and metrics, through
[staleness, zero_std, length, dynamic_sampling]. Seconds of one core (CPU time): both ways take turns, and each figure
is the median of `--repeats` runs after one that is not counted. The last line is one JSON object.
"""

import argparse
import cProfile
import gc
import json
import pstats
import statistics
import time

import numpy as np

from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.keys import sample_keys
from asyncrl.filters import Chain, FilterContext
from asyncrl.filters.base import BaseRolloutFilter
from asyncrl.filters.builtin.dynamic_sampling import DynamicSampling
from asyncrl.filters.builtin.length import Length
from asyncrl.filters.builtin.staleness import Staleness
from asyncrl.filters.builtin.zero_std import ZeroStd

SIZE = 8
VERSION = 10


class _OneByOne:
    """Makes a filter judge group by group, as a user's plain filter does."""

    judges_columns = False


class PlainStaleness(_OneByOne, Staleness):
    pass


class PlainZeroStd(_OneByOne, ZeroStd):
    pass


class PlainLength(_OneByOne, Length):
    pass


class PlainDynamicSampling(_OneByOne, DynamicSampling):
    pass


def groups_of(count: int) -> list[GroupMeta]:
    rng = np.random.default_rng(0)
    versions = rng.integers(VERSION - 4, VERSION + 1, count).tolist()
    chances = rng.random(count)
    rewards = (rng.random((count, SIZE)) < chances[:, None]).astype(float).tolist()
    lengths = rng.lognormal(5, 1, (count, SIZE)).astype(int).clip(1, 4096).tolist()
    finished = ["finished"] * SIZE
    return [
        GroupMeta(
            sample_keys(versions[i], i, SIZE),
            {
                "group": i,
                "prompt": i % 1000,
                "dataset": "math",
                "version": versions[i],
                "end_version": versions[i],
                "prompt_tokens": 64,
                "response_tokens": lengths[i],
                "trainable_tokens": lengths[i],
                "reward": rewards[i],
                "status": finished,
                "cause": [None] * SIZE,
            },
        )
        for i in range(count)
    ]


def chain_of(plain: bool) -> list[BaseRolloutFilter]:
    if plain:
        return [
            PlainStaleness(max_age=2),
            PlainZeroStd(),
            PlainLength(max_tokens=2048),
            PlainDynamicSampling(0.1, 0.9),
        ]
    return [Staleness(max_age=2), ZeroStd(), Length(max_tokens=2048), DynamicSampling(0.1, 0.9)]


def measure(groups: list[GroupMeta], plain: bool) -> tuple[float, dict[str, int]]:
    chain = Chain(chain_of(plain), clock=time.process_time)
    context = FilterContext(trainer_version=VERSION, step=VERSION, seed=0)
    gc.collect()
    start = time.process_time()
    counts = chain.judge_columns(groups, context).counts()
    return time.process_time() - start, counts


def front_end_share(batches: int) -> float:
    """Return the filters' share of the front end's CPU time in a run of 16 groups of 16 a batch, as profiled.

    The front end's time is that of `next_batch` and `hand_off` with all they call, on the in-process data
    plane; TransferQueue's answers take longer, so that the share is smaller there.
    """
    from asyncrl.engine.testing.simulation import simulate, simulated_config

    config = simulated_config(
        rollout__groups_per_step=16,
        rollout__group_size=16,
        run__steps=None,
        run__batches=batches,
        filters=[
            {"name": "staleness", "max_age": 2},
            {"name": "zero_std"},
            {"name": "length", "max_tokens": 2048},
            {"name": "dynamic_sampling", "low": 0.1, "high": 0.9},
        ],
    )
    profile = cProfile.Profile(time.process_time)
    profile.runcall(simulate, config)
    # By (file, line, function): calls, and seconds in them without and with what they call.
    stats: dict[tuple[str, int, str], tuple[int, int, float, float]] = pstats.Stats(profile).stats  # type: ignore[attr-defined]

    def seconds(file: str, *functions: str) -> float:
        return sum(row[3] for (path, _, name), row in stats.items() if path.endswith(file) and name in functions)

    return seconds("filters/chain.py", "judge") / seconds("engine/loop/front_end.py", "next_batch", "hand_off")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", type=int, default=125_000)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each way that count")
    given = parser.parse_args()
    groups = groups_of(given.groups)
    gc.freeze()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    found: dict[bool, dict[str, int]] = {}
    for _ in range(given.repeats + 1):
        for plain, taken in seconds.items():
            took, found[plain] = measure(groups, plain=plain)
            taken.append(took)
    counts, plain_counts = found[False], found[True]
    if counts != {name.replace("Plain", ""): n for name, n in plain_counts.items()}:
        raise SystemExit(f"the two paths disagree: {counts} and {plain_counts}")
    print(f"dropped by reason: {counts}")
    result = {
        "samples": len(groups) * SIZE,
        "vectorised_s": round(statistics.median(seconds[False][1:]), 3),
        "per_group_s": round(statistics.median(seconds[True][1:]), 3),
        "repeats": given.repeats,
        "share_of_front_end": round(front_end_share(200), 4),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
