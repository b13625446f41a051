#!/usr/bin/env python
"""How long data sets of ten and of ten million prompts take to start: one JSON line.

Writes JSONL files of about 100 bytes per line to a temporary folder, and deletes them. `start_s` is what a run does
with a file before it starts: open, index and check; `start_cpu_s` is the processor's part of it. `next_ms` is the mean
over `--draws` prompts in shuffled order: read, decoded and rendered. Files were just written, so they are read from the
page cache, not from the disk.
"""

import argparse
import json
import resource
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

from asyncrl.collectors.data.prepare import with_data
from asyncrl.collectors.tasks.prepared import prepare_task
from asyncrl.configs import load_config

_BLOCK = 100_000
_NOTE = "n" * 40


def write(path: Path, lines: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for first in range(0, lines, _BLOCK):
            numbers = range(first, min(first + _BLOCK, lines))
            file.write("".join(f'{{"prompt": "{n:08d}>", "answer": "{n}", "note": "{_NOTE}"}}\n' for n in numbers))


def start(path: Path, lines: int, draws: int) -> dict[str, Any]:
    config = load_config("default", {"data.path": str(path), "data.max_prompt_tokens": 32})
    task = prepare_task("echo", {}, warm_up=False, lists=False)
    began, cpu = time.perf_counter(), time.process_time()
    stream = with_data(config, task).stream
    assert stream is not None
    started, cpu = time.perf_counter(), time.process_time() - cpu
    drawn = sum(1 for _ in islice(stream, draws))
    ended = time.perf_counter()
    return {
        "records": lines,
        "file_mb": round(path.stat().st_size / 1e6, 1),
        "start_s": round(started - began, 3),
        "start_cpu_s": round(cpu, 3),
        "next_ms": round(1000 * (ended - started) / drawn, 4),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, nargs="+", default=[10, 100_000, 10_000_000])
    parser.add_argument("--draws", type=int, default=10_000)
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for lines in options.records:
            path = Path(folder) / "set.jsonl"
            write(path, lines)
            found.append(start(path, lines, options.draws))
            path.unlink()
    print(json.dumps({"sets": found}))


if __name__ == "__main__":
    main()
