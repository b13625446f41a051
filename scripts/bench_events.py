"""What recording costs: the share of a run's time that the event log takes, and how fast it writes.

    .venv/bin/python scripts/bench_events.py [--runtime local] [--batches 240] [--events 1000000]

`overhead` is of the default run: CPU seconds of the log's own threads plus seconds inside the record call
elsewhere (folds included), over the run's seconds. `events_per_s` is of the run's own mix of events, written
again and again until `--events` are on the disk, synced; the median of three such writings, after one that is not
counted, and sizes are stated. The last line is one JSON object.
"""

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from asyncrl.engine.events.log import EventLog, read_events
from asyncrl.engine.events.types import AnyEvent
from asyncrl.engine.events.writer import ThreadedWriter


class Costs:
    """Seconds of recording, in this process."""

    def __init__(self) -> None:
        self.inside_s = 0.0
        self.calls = 0
        self.writer: ThreadedWriter | None = None

    @property
    def thread_s(self) -> float:
        return self.writer.cpu_s if self.writer is not None else 0.0


def timed_log(costs: Costs) -> None:
    """Time every call of the log; the run uses it as it is otherwise."""
    plain = {name: getattr(EventLog, name) for name in ("append", "flush", "close")}

    def timed(name: str) -> Any:
        def call(log: EventLog, *args: Any) -> None:
            if isinstance(log.writer, ThreadedWriter):
                costs.writer = log.writer
            started = time.perf_counter()
            plain[name](log, *args)
            costs.inside_s += time.perf_counter() - started
            costs.calls += 1

        return call

    for name in plain:
        setattr(EventLog, name, timed(name))


def default_run(folder: Path, runtime: str, batches: int) -> tuple[float, Costs]:
    """Run the default preset in this process; return its seconds and what recording cost."""
    from asyncrl.engine.run import run

    costs = Costs()
    timed_log(costs)
    started = time.perf_counter()
    run("default", folder, {"run.runtime": runtime, "run.batches": batches})
    return time.perf_counter() - started, costs


def writing_speed(events: list[AnyEvent], count: int, folder: Path) -> dict[str, Any]:
    """Write `count` events of the mix through the threaded log; the time ends when all are synced."""
    batch = 2000
    mixed = [events[i % len(events)] for i in range(count)]
    log = EventLog(clock=time.monotonic, wall=time.time, path=folder / "events.jsonl", threaded=True)
    append = log.append
    started = time.perf_counter()
    for place, event in enumerate(mixed):
        append(event)
        if place % batch == 0:
            log.flush()
    log.close()
    seconds = time.perf_counter() - started
    written = sum(path.stat().st_size for path in folder.iterdir())
    read = sum(1 for _ in read_events(folder))
    if read != count:
        raise SystemExit(f"{count} events were written and {read} read back")
    return {"events_per_s": round(count / seconds), "events": count, "seconds": round(seconds, 3), "bytes": written}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runtime", choices=["ray", "local"], default="local")
    parser.add_argument("--batches", type=int, default=240)
    parser.add_argument("--events", type=int, default=1_000_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        run.mkdir()
        plain = {name: getattr(EventLog, name) for name in ("append", "flush", "close")}
        seconds, costs = default_run(run, given.runtime, given.batches)
        for name, call in plain.items():
            setattr(EventLog, name, call)
        events = list(read_events(run))
        mix = Counter(str(event.__struct_config__.tag) for event in events)
        size = (run / "events.jsonl").stat().st_size
        print(f"the run's mix: {dict(mix.most_common())}; {size / len(events):.0f} bytes an event")
        speeds = []
        for attempt in range(4):
            folder = Path(scratch) / f"speed{attempt}"
            folder.mkdir()
            speeds.append(writing_speed(events, given.events, folder))
    middle = sorted(speeds[1:], key=lambda speed: speed["events_per_s"])[1]
    result = {
        "overhead": round((costs.thread_s + costs.inside_s) / seconds, 5),
        "runtime": given.runtime,
        "run_s": round(seconds, 2),
        "run_events": len(events),
        "record_call_s": round(costs.inside_s, 4),
        "thread_cpu_s": round(costs.thread_s, 4),
        "bytes_an_event": round(size / len(events), 1),
        **middle,
        "cores": os.cpu_count(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
