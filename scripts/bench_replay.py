"""How fast a log of 100,000 samples replays: verdicts, plans and fates, compared event by event.

    .venv/bin/python scripts/bench_replay.py [--samples 100000]

The log is of a run in virtual time under the default preset's sizes (16 groups of 16, two ranks, half of
the groups flat). `replay_s` is of the whole command, imports included: the median of `--repeats` runs after one that
is not counted. The last line is one JSON object.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from asyncrl.engine.events.types import Settled
from asyncrl.engine.testing.fakes import FakeGenerator, FakeTask
from asyncrl.engine.testing.simulation import simulate, simulated_config
from asyncrl.engine.testing.trace import recording_of
from asyncrl.engine.trace.cutting import write_log

GROUP_SIZE = 16
GROUPS_PER_STEP = 16


def reward(group: int, index: int) -> float:
    """Half of the groups are flat, the others mixed."""
    return 0.0 if group % 2 else float(random.Random(f"{group}/{index}").random() < 0.5)


def record(path: Path, samples: int) -> int:
    """Write the log of a run of so many samples; return how many it has."""
    config = simulated_config(
        rollout__groups_per_step=GROUPS_PER_STEP,
        rollout__group_size=GROUP_SIZE,
        rollout__max_new_tokens=64,
        run__steps=None,
        run__batches=-(-samples // (GROUPS_PER_STEP * GROUP_SIZE)),
        trainer__ranks=2,
    )
    lengths = random.Random(0)
    outcome = simulate(
        config,
        task=FakeTask.in_order(reward, prompts=samples // GROUP_SIZE + 256),
        generators=[FakeGenerator(length=lambda call: lengths.randint(2, 64))],
    )
    write_log(path, recording_of(outcome).events)
    return sum(len(event.fates) for event in outcome.events if isinstance(event, Settled))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3, help="runs of the command that count")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "events.jsonl"
        samples = record(path, given.samples)
        times = []
        for _ in range(given.repeats + 1):
            started = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-m", "asyncrl", "replay", str(path)], capture_output=True, text=True, check=False
            )
            times.append(time.perf_counter() - started)
        seconds = statistics.median(times[1:])
        print(done.stdout.strip() or done.stderr.strip())
        size = path.stat().st_size
    result = {
        "samples": samples,
        "bytes": size,
        "replay_s": round(seconds, 2),
        "identical": done.returncode == 0,
        "samples_per_s": round(samples / seconds),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
