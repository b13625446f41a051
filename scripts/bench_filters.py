"""How long filters take for 1,000,000 samples (125,000 groups of 8), in columns and group by group.

From tags as the data plane returns them to verdicts with reasons, counts and metrics, through
[staleness, zero_std, length, dynamic_sampling]. The last line is one JSON object.
"""

import argparse
import gc
import json
import time

import numpy as np

from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.keys import sample_keys
from asyncrl.filters import Chain, FilterContext
from asyncrl.filters.base import BaseRolloutFilter
from asyncrl.filters.dynamic_sampling import DynamicSampling
from asyncrl.filters.length import Length
from asyncrl.filters.staleness import Staleness
from asyncrl.filters.zero_std import ZeroStd

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
    chain = Chain(chain_of(plain), clock=time.perf_counter)
    context = FilterContext(trainer_version=VERSION, step=VERSION, seed=0)
    gc.collect()
    start = time.perf_counter()
    counts = chain.judge_columns(groups, context).counts()
    return time.perf_counter() - start, counts


def front_end_share(batches: int) -> float:
    """Return the filters' share of the front end's time in a run on the in-process plane."""
    from asyncrl.engine.testing.simulation import simulate, simulated_config

    config = simulated_config(
        rollout__groups_per_step=16, rollout__group_size=16, run__steps=None, run__batches=batches
    )
    start = time.process_time()
    outcome = simulate(config)
    whole = time.process_time() - start
    del outcome
    groups = groups_of(16)
    chain = Chain(chain_of(False))
    context = FilterContext(trainer_version=VERSION, step=VERSION, seed=0)
    start = time.process_time()
    for _ in range(batches):
        chain.judge(groups, context)
    return (time.process_time() - start) / whole


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", type=int, default=125_000)
    groups = groups_of(parser.parse_args().groups)
    gc.freeze()
    vectorised, counts = min((measure(groups, plain=False) for _ in range(3)), key=lambda pair: pair[0])
    per_group, plain_counts = measure(groups, plain=True)
    if counts != {name.replace("Plain", ""): n for name, n in plain_counts.items()}:
        raise SystemExit(f"the two paths disagree: {counts} and {plain_counts}")
    print(f"dropped by reason: {counts}")
    result = {
        "samples": len(groups) * SIZE,
        "vectorised_s": round(vectorised, 3),
        "per_group_s": round(per_group, 3),
        "share_of_simulated_run": round(front_end_share(200), 4),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
