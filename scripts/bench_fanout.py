#!/usr/bin/env python
"""Plans of the trainer's ranks beside those of verl and AReaL: the last line is one JSON object.

Log-normal lengths, the same for all. `plan_ms_*` is of everything that `plan_batch` does, the sorting of keys and the
making of the plan included; `peer_*_ms_*` of what a peer does to come to indices, and `peer_ours_ms_*` of ours in
turns with them. Every one is the median processor time of `--runs` runs after one that is not counted (nothing here
has a second thread). `fill` is tokens over the room of all micro-batches; `fill_allowed_*` is what the
lower bound on micro-batches, rounded up to a multiple of the ranks, would reach. `imbalance*` is the heaviest rank's
cost over the mean: tokens, and with `_flops` a linear and a quadratic term. With `_groups`, samples of a group are
kept together, as in a run: `reads_a_group_*` is by how many ranks a group is read, `_apart` without. `*_seeds` are of
so many other lengths. A random case counts as lost (`peer_*_better`) if the peer's relative gains in fill and balance
add up to more than a thousandth, `_strict` if to anything, and `peer_*_better_by` is the most in any case; all of it
twice, with `_groups` against plans that keep groups together as a run does, which peers do not. Ratios of the data
plane are those of `bench_plane.py`.

The peers are installed by pip, without dependencies but numba, into a folder that is thrown away, or taken from
`--peers`; one that cannot be had is null, and a line on stderr says why. AReaL's planner imports numba: `areal_numba`
says whether it was there, else it is stood in for (what is timed here is not compiled by it either way). All of it
takes ten to twenty minutes.
"""

import argparse
import importlib
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from asyncrl.engine.records import Plan
from asyncrl.trainers.cost.model import CostModel
from asyncrl.trainers.fan_out import plan_batch

PEERS = ("verl==0.9.1", "areal==1.0.4")
NUMBA = ("numba", "llvmlite")
HOW = f"pip install --no-deps --target FOLDER {' '.join((*PEERS, *NUMBA))}, and then --peers FOLDER"
CAPACITY = 16_384
ODDS = 1e-3
"""A peer's plan counts as better if its gains in fill and balance add up to more than this (`_strict`: to anything)."""
ROUNDING = 1e-9
"""Gains up to this are of floating point."""
SEVEN_B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}

Bins = list[list[list[int]]]
"""By rank, by micro-batch: indices of samples."""


@dataclass(frozen=True)
class Quality:
    bins: int
    fill: float
    imbalance: float


def log_normal(count: int, seed: int, *, capacity: int = CAPACITY) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(7.5, 1.0, count)
    clipped: list[int] = np.clip(drawn.astype(np.int64), 1, capacity).tolist()
    return clipped


def as_batch(lengths: Sequence[int], seed: int) -> dict[str, int]:
    """Name the samples in groups of 8 and let them arrive in any order."""
    items = [(f"v3_p{index // 8}_g{index % 8}", tokens) for index, tokens in enumerate(lengths)]
    random.Random(seed).shuffle(items)
    return dict(items)


def timed_in_turns(plans: Mapping[str, Callable[[], Any]], runs: int) -> dict[str, tuple[float, Any]]:
    """Return, by name, the median processor time in ms of `runs` runs after one not counted, and what came out."""
    times: dict[str, list[float]] = {name: [] for name in plans}
    out: dict[str, Any] = {}
    for _ in range(runs + 1):
        for name, plan in plans.items():
            start = time.process_time()
            out[name] = plan()
            times[name].append(1000 * (time.process_time() - start))
    return {name: (round(statistics.median(times[name][1:]), 3), out[name]) for name in plans}


def timed(plan: Callable[[], Any], runs: int) -> tuple[float, Any]:
    return timed_in_turns({"": plan}, runs)[""]


def quality(ranks: Sequence[Sequence[Sequence[int]]], capacity: int) -> Quality:
    """Judge a plan given as the sizes of samples, by rank and micro-batch."""
    loads = [sum(map(sum, rank)) for rank in ranks]
    bins = max(len(rank) for rank in ranks) * len(ranks)
    return Quality(bins, sum(loads) / (bins * capacity), max(loads) * len(ranks) / sum(loads))


def sizes_of(plan: Plan, lengths: Mapping[str, int]) -> list[list[list[int]]]:
    return [[[] if b.filler else [lengths[key] for key in b.keys] for b in rank] for rank in plan.ranks]


def imbalance(plan: Plan, cost: Callable[[int], float], lengths: Mapping[str, int]) -> float:
    loads = [sum(cost(tokens) for micro in rank for tokens in micro) for rank in sizes_of(plan, lengths)]
    return round(max(loads) * len(loads) / sum(loads), 7)


def multiple(number: int, of: int) -> int:
    return of * -(-number // of)


def reads_a_group(plan: Plan, groups: Mapping[str, str]) -> float:
    reads = {(rank, groups[key]) for rank, hand in enumerate(plan.ranks) for micro in hand for key in micro.keys}
    return round(len(reads) / len(set(groups.values())), 4)


def ours(lengths: Sequence[int], ranks: int, *, name: str, runs: int, seed: int) -> dict[str, float]:
    batch = as_batch(lengths, seed)
    groups = {key: key.rpartition("_")[0] for key in batch}
    options: dict[str, Any] = {"ranks": ranks, "budget_tokens": CAPACITY}
    median, plan = timed(lambda: plan_batch(batch, **options), runs)
    found = quality(sizes_of(plan, batch), CAPACITY)
    least = multiple(-(-sum(lengths) // CAPACITY), ranks)
    model = CostModel.of(SEVEN_B)
    flops_ms, by_flops = timed(lambda: plan_batch(batch, **options, cost=model.flops), runs)
    near_ms, near = timed(lambda: plan_batch(batch, **options, groups=groups), runs)
    return {
        f"plan_ms_{name}": median,
        f"bins_{name}": found.bins,
        f"lower_bound_{name}": least,
        f"fill_{name}": round(found.fill, 6),
        f"fill_allowed_{name}": round(sum(lengths) / (least * CAPACITY), 6),
        f"fill_of_allowed_{name}": round(found.fill * least * CAPACITY / sum(lengths), 6),
        f"imbalance_{name}": round(found.imbalance, 7),
        f"plan_ms_{name}_flops": flops_ms,
        f"imbalance_{name}_flops": imbalance(by_flops, lambda n: float(model.flops(np.array([n]))[0]), batch),
        f"plan_ms_{name}_groups": near_ms,
        f"bins_{name}_groups": sum(map(len, near.ranks)),
        f"imbalance_{name}_groups": round(quality(sizes_of(near, batch), CAPACITY).imbalance, 7),
        f"reads_a_group_{name}": reads_a_group(near, groups),
        f"reads_a_group_{name}_apart": reads_a_group(plan, groups),
    }


def over_seeds(count: int, ranks: int, *, name: str, seeds: range, runs: int) -> dict[str, float]:
    """Plan other lengths, with and without groups: median and worst of their medians, how often the bound is missed."""
    out: dict[str, float] = {}
    for grouped in (False, True):
        times, missed, worst = [], 0, 0.0
        for seed in seeds:
            lengths = log_normal(count, seed)
            batch = as_batch(lengths, seed)
            groups = {key: key.rpartition("_")[0] for key in batch} if grouped else None
            plan_it = partial(plan_batch, batch, ranks=ranks, budget_tokens=CAPACITY, groups=groups)
            median, plan = timed(plan_it, runs)
            times.append(median)
            found = quality(sizes_of(plan, batch), CAPACITY)
            missed += found.bins > multiple(-(-sum(lengths) // CAPACITY), ranks)
            worst = max(worst, found.imbalance)
        label = f"{name}_groups_seeds" if grouped else f"{name}_seeds"
        out |= {f"plan_ms_{label}": round(statistics.median(times), 3), f"plan_ms_{label}_worst": round(max(times), 3)}
        out |= {f"bound_missed_{label}": missed, f"imbalance_{label}": round(worst, 7)}
    return out | {f"seeds_{name}": len(seeds)}


def plane_ratios() -> dict[str, Any]:
    """Run the data plane's bench and take its ratios to raw TransferQueue."""
    script = Path(__file__).parent / "bench_plane.py"
    done = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, timeout=900, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    names = ("put_ratio", "get_ratio", "get_ratio_unread", "put_share_of_copy", "get_share_of_copy")
    return {name: found[name] for name in names}


def read_module(path: Path, name: str, stand_ins: Mapping[str, ModuleType]) -> ModuleType:
    """Load one file of a peer; what it imports of the rest of its package, and does not need, is stood in for."""
    before = {key: sys.modules.get(key) for key in stand_ins}
    sys.modules.update(stand_ins)
    try:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"no module at {path}")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        for key, module_before in before.items():
            if module_before is None:
                del sys.modules[key]
            else:
                sys.modules[key] = module_before


def stand_in(name: str, **contents: object) -> ModuleType:
    module = ModuleType(name)
    for key, value in contents.items():
        setattr(module, key, value)
    return module


def install(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--retries", "1", "--target"]
    for requirement in (*PEERS, *NUMBA):
        try:
            subprocess.run([*command, str(folder), requirement], capture_output=True, timeout=240, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            print(f"{requirement}: {error}", file=sys.stderr)


def load_verl(folder: Path) -> Callable[[Sequence[int], int, int], Bins]:
    """verl: Karmarkar-Karp over ranks, then over each rank's micro-batches, their number the ranks' greatest."""
    import logging

    logging.getLogger().setLevel(logging.ERROR)
    utils = stand_in("verl.utils", tensordict_utils=None)
    module = read_module(
        folder / "verl/utils/seqlen_balancing.py",
        "peer_verl",
        {
            "verl": stand_in("verl"),
            "verl.protocol": stand_in("verl.protocol", DataProto=None),
            "verl.utils": utils,
            "verl.utils.device": stand_in("verl.utils.device", get_device_name=lambda: "cpu"),
        },
    )
    partition = module.get_seqlen_balanced_partitions

    def plan(lengths: Sequence[int], ranks: int, capacity: int) -> Bins:
        hands = partition(list(lengths), ranks, equal_size=len(lengths) % ranks == 0)
        count = max(-(-sum(lengths[i] for i in hand) // capacity) for hand in hands)
        while count <= min(map(len, hands)):
            split = [partition([lengths[i] for i in hand], count, equal_size=False) for hand in hands]
            out = [[[hand[j] for j in micro] for micro in micros] for hand, micros in zip(hands, split, strict=True)]
            if all(sum(lengths[i] for i in micro) <= capacity for rank in out for micro in rank):
                return out
            count += 1
        raise ValueError("no plan")

    return plan


def find_numba(folder: Path) -> ModuleType | None:
    """Import numba, AReaL's compiler, from this environment or beside the peers; None if it is in neither."""
    sys.path.append(str(folder))
    try:
        return importlib.import_module("numba")
    except ImportError as error:
        print(f"without numba: {error}. To have it: {HOW}", file=sys.stderr)
        return None
    finally:
        sys.path.remove(str(folder))


def load_areal(folder: Path) -> Callable[[Sequence[int], int, int], Bins]:
    """AReaL: its first fit into a multiple of the ranks, then its greedy partition of those over the ranks."""
    import logging

    numba = find_numba(folder) or stand_in("numba", njit=lambda function: function)
    areal_utils = stand_in("areal.utils", logging=logging)
    module = read_module(
        folder / "areal/utils/seqpack.py",
        "peer_areal",
        {"areal": stand_in("areal"), "areal.utils": areal_utils, "numba": numba},
    )

    def plan(lengths: Sequence[int], ranks: int, capacity: int) -> Bins:
        least = multiple(-(-sum(lengths) // capacity), ranks)
        bins = [[int(i) for i in some] for some in module.ffd_allocate(list(lengths), capacity, least, ranks)]
        loads = [sum(lengths[i] for i in some) for some in bins]
        return [[bins[i] for i in hand] for hand in module.balanced_greedy_partition(loads, ranks)]

    return plan


LOADERS = {"verl": load_verl, "areal": load_areal}


def load_peers(folder: Path) -> dict[str, Callable[[Sequence[int], int, int], Bins] | None]:
    peers: dict[str, Callable[[Sequence[int], int, int], Bins] | None] = {}
    for requirement in PEERS:
        name = requirement.partition("==")[0]
        try:
            peers[name] = LOADERS[name](folder)
        except (ImportError, OSError) as error:
            peers[name] = None
            print(f"without {name}: {error}. To have it: {HOW}", file=sys.stderr)
    return peers


def sizes_by(indices: Bins, lengths: Sequence[int]) -> list[list[list[int]]]:
    return [[[lengths[i] for i in micro] for micro in rank] for rank in indices]


def peer_figures(
    peers: Mapping[str, Callable[[Sequence[int], int, int], Bins] | None],
    shared: Sequence[tuple[str, list[int], int]],
    *,
    runs: int,
) -> dict[str, float | None]:
    """Plan the same lengths with every peer and with ours, in turns."""
    out: dict[str, float | None] = {}
    for label, lengths, ranks in shared:
        batch = as_batch(lengths, 0)
        plans: dict[str, Callable[[], Any]] = {
            name: partial(peer, lengths, ranks, CAPACITY) for name, peer in peers.items() if peer is not None
        }
        plans["ours"] = partial(plan_batch, batch, ranks=ranks, budget_tokens=CAPACITY)
        timings = timed_in_turns(plans, runs)
        out[f"peer_ours_ms_{label}"] = timings.pop("ours")[0]
        for name in peers:
            keys = [f"peer_{name}_{what}_{label}" for what in ("ms", "bins", "fill", "imbalance")]
            if name not in timings:
                out |= dict.fromkeys(keys)
                continue
            ms, indices = timings[name]
            found = quality(sizes_by(indices, lengths), CAPACITY)
            out |= dict(zip(keys, (ms, found.bins, round(found.fill, 6), round(found.imbalance, 7)), strict=True))
    return out


def random_case(random_: random.Random) -> tuple[list[int], int, int]:
    """Lengths, ranks and capacity of one case: few and many samples, narrow and wide, loose and tight budgets."""
    ranks = random_.choice([2, 3, 4, 8, 16])
    count = random_.randint(ranks, 40 * ranks)
    capacity = random_.choice([512, 4096, 16_384])
    middle, width = random_.uniform(0.02, 0.6), random_.uniform(0.1, 1.5)
    draws = [capacity * middle * random_.lognormvariate(0.0, width) for _ in range(count)]
    return [max(1, min(capacity, int(draw))) for draw in draws], ranks, capacity


def better_by(peer: Quality, own: Quality) -> float:
    """How far a peer's plan is better: its relative gains in fill and in balance, added; losses count against."""
    return peer.fill / own.fill - 1 + own.imbalance / peer.imbalance - 1


@dataclass(slots=True)
class Score:
    """Cases that one peer planned, and those in which its plan was better than one of ours."""

    planned: int = 0
    better: int = 0
    better_strict: int = 0
    worst: dict[str, float] = field(default_factory=lambda: {"by": 0.0})

    def add(self, peer: Quality, own: Quality, **case: int) -> None:
        by = better_by(peer, own)
        self.planned += 1
        self.better += by > ODDS
        self.better_strict += by > ROUNDING
        if by > max(ROUNDING, self.worst["by"]):
            plans = {"fill": own.fill, "imbalance": own.imbalance}
            plans |= {"peer_fill": peer.fill, "peer_imbalance": peer.imbalance}
            self.worst = {"by": round(by, 6), **case, **plans}


def duel(
    peers: Mapping[str, Callable[[Sequence[int], int, int], Bins] | None], cases: int, *, seed: int
) -> dict[str, Any]:
    """Plan random cases, without and with groups kept together, and count those in which a peer's plan is better."""
    random_ = random.Random(seed)
    present = {name: peer for name, peer in peers.items() if peer is not None}
    scores = {mode: {name: Score() for name in present} for mode in ("", "_groups")}
    for _ in range(cases):
        lengths, ranks, capacity = random_case(random_)
        batch = as_batch(lengths, 0)
        groups = {key: key.rpartition("_")[0] for key in batch}
        own = {
            mode: quality(
                sizes_of(plan_batch(batch, ranks=ranks, budget_tokens=capacity, groups=near), batch), capacity
            )
            for mode, near in (("", None), ("_groups", groups))
        }
        for name, peer in present.items():
            try:
                found = quality(sizes_by(peer(lengths, ranks, capacity), lengths), capacity)
            except (ValueError, AssertionError, RuntimeError):
                continue
            for mode, mine in own.items():
                scores[mode][name].add(found, mine, samples=len(lengths), ranks=ranks, capacity=capacity)
    out: dict[str, Any] = {"cases": cases, "seed": seed}
    for mode, by_peer in scores.items():
        out[f"violations{mode}"] = sum(score.better for score in by_peer.values())
        out[f"violations_strict{mode}"] = sum(score.better_strict for score in by_peer.values())
        out[f"worst_violation{mode}"] = max((s.worst for s in by_peer.values()), key=lambda w: w["by"], default=None)
        for name in peers:
            score = by_peer.get(name)
            out[f"peer_{name}_better{mode}"] = score and score.better
            out[f"peer_{name}_better_strict{mode}"] = score and score.better_strict
            out[f"peer_{name}_better_by{mode}"] = score and score.worst["by"]
            out[f"peer_{name}_planned"] = score and score.planned
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000, help="random cases against the peers")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths and of the random cases")
    parser.add_argument("--seeds", type=int, default=30, help="other lengths that 512 and 16,384 samples have")
    parser.add_argument("--runs", type=int, default=5, help="of each plan, ours or a peer's; the median counts")
    parser.add_argument("--peers", type=Path, help="folder with the peers, instead of installing them")
    parser.add_argument("--no-peers", action="store_true", help="neither install nor compare")
    parser.add_argument("--no-plane", action="store_true", help="do without bench_plane.py, which needs Ray")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    runs = [("64", 64, 8), ("512", 512, 16), ("16384", 16_384, 16), ("262144", 262_144, 512)]
    for name, count, ranks in runs:
        lengths = log_normal(count, options.seed)
        repeats = options.runs if count < 100_000 else 3
        figures |= ours(lengths, ranks, name=name, runs=repeats, seed=options.seed)
    figures |= {short: figures[f"{short}_16384"] for short in ("bins", "lower_bound", "fill", "imbalance")}
    seeds = range(options.seed, options.seed + options.seeds)
    for name, count in (("512", 512), ("16384", 16_384)):
        figures |= over_seeds(count, 16, name=name, seeds=seeds, runs=options.runs)
    with tempfile.TemporaryDirectory() as folder:
        if options.peers is None and not options.no_peers:
            install(Path(folder))
        peers = dict.fromkeys(LOADERS) if options.no_peers else load_peers(options.peers or Path(folder))
        shared = [(name, log_normal(count, options.seed), ranks) for name, count, ranks in runs[1:3]]
        figures |= peer_figures(peers, shared, runs=options.runs)
        figures["areal_numba"] = None if peers["areal"] is None else "numba" in sys.modules
        figures |= duel(peers, options.cases, seed=options.seed)
    figures |= {} if options.no_plane else plane_ratios()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
