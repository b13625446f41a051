#!/usr/bin/env python
"""What adapting the requests in flight buys, on a model of an engine's cache: the last line is one JSON object.

    .venv/bin/python scripts/bench_in_flight.py

The modelled engine decodes all sequences together: a step takes 8 ms, 0.03 ms per sequence, and 0.06 ms per token of
prompts that are filled. Its cache holds `--cache` tokens. A sequence begins when its tokens fit; when the cache is
full, the youngest is taken out and computed anew later, with the tokens it has (vLLM's preemption by recomputation).
3,000 requests of 256 prompt tokens and log-normally long answers (mean 512, at most 4096), 256 rows.

Per cache, tokens per second: `adaptive`; `rows`, with as many in flight as there are rows; `best_fixed`, the best of
the limits 8, 16, ..., 256, which nobody knows beforehand; and how often a sequence was taken out.
"""

import argparse
import json
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from asyncrl.collectors.engines.in_flight import InFlightLimit, Pressure

ROWS = 256
PROMPT = 256
FILL_MOST = 8192


@dataclass
class Sequence:
    length: int
    made: int = 0

    @property
    def tokens(self) -> int:
        return PROMPT + self.made


class ModelEngine:
    """Continuous batching over a cache of `cache` tokens."""

    def __init__(self, cache: int) -> None:
        self._cache = cache
        self._used = 0
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0

    @property
    def in_flight(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def pressure(self) -> Pressure:
        return Pressure(self._used / self._cache, len(self.waiting), self.preemptions)

    def step(self) -> float:
        """Make a token of each sequence; return the seconds it took."""
        filled = self._admit()
        while self._used + len(self.running) > self._cache and len(self.running) > 1:
            out = self.running.pop()
            self._used -= out.tokens
            self.waiting.appendleft(out)
            self.preemptions += 1
        seconds = 0.008 + 0.00003 * len(self.running) + 0.00006 * filled
        for sequence in self.running:
            sequence.made += 1
        self._used += len(self.running)
        self._used -= sum(sequence.tokens for sequence in self.running if sequence.made >= sequence.length)
        self.running = [sequence for sequence in self.running if sequence.made < sequence.length]
        return seconds

    def _admit(self) -> int:
        filled = 0
        while self.waiting and len(self.running) < ROWS and filled < FILL_MOST:
            needed = self.waiting[0].tokens
            if self._used + needed > self._cache:
                break
            self.running.append(self.waiting.popleft())
            self._used += needed
            filled += needed
        return filled


def run(cache: int, limit: Callable[[], int], heard: Callable[[Pressure, int, float], object]) -> tuple[float, int]:
    """Return tokens per second, and preemptions."""
    drawn = random.Random(0)
    lengths = [max(1, min(4096, int(drawn.lognormvariate(0, 0.9) * 512 / 1.5))) for _ in range(3000)]
    asked, engine, now = deque(Sequence(length) for length in lengths), ModelEngine(cache), 0.0
    while asked or engine.in_flight:
        while asked and engine.in_flight < limit():
            engine.waiting.append(asked.popleft())
        now += engine.step()
        heard(engine.pressure, engine.in_flight, now)
    return sum(lengths) / now, engine.preemptions


def adaptive(cache: int) -> tuple[float, int]:
    in_flight = InFlightLimit(ROWS)
    return run(cache, lambda: in_flight.limit, lambda said, n, now: in_flight.observe(said, in_flight=n, now=now))


def fixed(cache: int, limit: int) -> tuple[float, int]:
    return run(cache, lambda: limit, lambda said, n, now: None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=int, nargs="*", default=[16_000, 40_000, 80_000, 160_000, 320_000])
    found = {}
    for cache in parser.parse_args().cache:
        rate, preemptions = adaptive(cache)
        at_rows, preemptions_at_rows = fixed(cache, ROWS)
        best = max(fixed(cache, 2**power)[0] for power in range(3, 9))
        found[cache] = {
            "adaptive": round(rate),
            "rows": round(at_rows),
            "best_fixed": round(best),
            "adaptive_over_rows": round(rate / at_rows, 3),
            "adaptive_over_best_fixed": round(rate / best, 3),
            "preemptions": preemptions,
            "preemptions_at_rows": preemptions_at_rows,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
