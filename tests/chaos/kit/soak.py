"""`scripts/soak --minutes N`: small steps for a long time; memory, open files, threads and keys have to stay flat.

The first third is a warm-up. A figure is flat if its median in the last third is not over that of the second third by
more than its allowance. Prints one JSON line; exit code 1 if a figure grows, or the run ends too early.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from kit import processes, settings
from kit.launch import Cold
from kit.plan import PARTS
from kit.tail import Tail

EVERY_S = 2.0
START_S = 120.0
END_S = 90.0

ALLOWED = {"own_mb": (4.0, 0.02), "files": (2.0, 0.0), "threads": (2.0, 0.0), "rows": (3.0, 0.0)}
"""By figure: how much it may grow from the second third to the last, absolutely and as a share of itself.

4 MB in the last ten minutes of thirty are 24 MB per hour; less is lost in what allocators do.
"""

Series = dict[str, list[float]]
"""Samples by name, such as `collector.0 own_mb`."""


def growing(series: Series) -> dict[str, list[float]]:
    """Return the figures that are not flat, with their medians in the second and in the last third.

    Example: [1, 9, 20, 20, 25, 25] own_mb is flat after its warm-up but for 5 MB, which are over 4 MB and 2 %.
    """
    found = {}
    for name, samples in series.items():
        third = len(samples) // 3
        if not third:
            continue
        before, after = statistics.median(samples[third : 2 * third]), statistics.median(samples[2 * third :])
        most, share = ALLOWED[name.rpartition(" ")[2]]
        if after > before + max(most, share * before):
            found[name] = [round(before, 1), round(after, 1)]
    return found


def sample(driver: int, series: Series, *, rows: Path | None) -> None:
    """Add one sample of each process, and of the rows in the store."""
    named = [(f"{part}.{i}", found) for part in PARTS for i, found in enumerate(processes.of_part(part, driver))]
    others = [p for p in processes.tree(driver) if p.pid not in {found.pid for _, found in named}]
    for process in others:
        with suppress(psutil.Error):
            if process.name() in ("raylet", "gcs_server"):
                named.append((process.name(), process))
    for name, process in named:
        with suppress(psutil.Error):
            memory = process.memory_info()
            series[f"{name} own_mb"].append((memory.rss - memory.shared) / 1e6)
            series[f"{name} files"].append(process.num_fds())
            series[f"{name} threads"].append(process.num_threads())
    if rows is not None and rows.is_dir():
        series["store rows"].append(len(os.listdir(rows)) - 1)


def soak(folder: Path, *, minutes: float, options: Sequence[str]) -> tuple[Series, int, str]:
    """Run for so long; return the samples, the steps, and what was wrong with the run, if anything."""
    settings.prepare(folder)
    limits = settings.Limits(dead_s=60.0)
    given = {**settings.options(limits), "trainer.min_step_s": "0", "checkpoint.every_steps": "100"}
    given |= dict(word.split("=", 1) for word in options)
    known = set(Path("/dev/shm").glob("asyncrl-*"))
    driver = Cold().start(folder, settings.first_words(given))
    tail, series = Tail(folder / settings.RUN / "events.jsonl"), defaultdict[str, list[float]](list)
    try:
        until = time.monotonic() + START_S
        while not tail.read().steps and driver.poll() is None and time.monotonic() < until:
            time.sleep(0.5)
        if not tail.steps:
            return series, 0, f"no step within {START_S:g} s: {driver.said()[-2000:]}"
        rows = next(iter(set(Path("/dev/shm").glob("asyncrl-*")) - known), None)
        until = time.monotonic() + 60 * minutes
        while time.monotonic() < until and driver.poll() is None:
            sample(driver.pid, series, rows=rows)
            time.sleep(EVERY_S)
            tail.read()
        if driver.poll() is not None:
            return series, tail.steps, f"ended early with {driver.poll()}: {driver.said()[-2000:]}"
        os.kill(driver.pid, signal.SIGTERM)
        until = time.monotonic() + END_S
        while driver.poll() is None and time.monotonic() < until:
            time.sleep(0.2)
        fault = "" if driver.poll() == 143 else f"SIGTERM gave exit code {driver.poll()}, not 143"
        return series, tail.read().steps, fault
    finally:
        processes.kill_all([*processes.tree(driver.pid), *processes.of_part("driver", driver.pid)])


def main() -> int:
    """Read the options, soak, and say what grows."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--folder", type=Path, default=None, help="for the run and the samples; a new one by default")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of the run")
    given = parser.parse_args()
    folder: Path = (given.folder or Path(tempfile.mkdtemp(prefix="asyncrl-soak-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    series, steps, fault = soak(folder, minutes=given.minutes, options=given.set)
    (folder / "samples.json").write_text(json.dumps(series), encoding="utf-8")
    grows = growing(series)
    last = {name: round(samples[-1], 1) for name, samples in series.items()}
    line = {"minutes": given.minutes, "steps": steps, "grows": grows, "fault": fault, "last": last}
    sys.stdout.write(json.dumps(line) + "\n")
    return 1 if grows or fault or not steps else 0


if __name__ == "__main__":
    sys.exit(main())
