"""What a session leaves in its folder: one JSON line per fault, and a page for people."""

import json
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path

from kit.session import Result, Tally

FAULTS = "faults.jsonl"
PAGE = "report.md"


def write_result(folder: Path, result: Result) -> None:
    """Append a fault's outcome."""
    with (folder / FAULTS).open("a", encoding="utf-8") as out:
        out.write(json.dumps(asdict(result)) + "\n")


def write_page(folder: Path, tally: Tally, *, seed: int) -> None:
    """Write the report."""
    (folder / PAGE).write_text(page(tally, seed=seed), encoding="utf-8")


def page(tally: Tally, *, seed: int) -> str:
    """Return the report in Markdown."""
    rows: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    slowest: defaultdict[tuple[str, str], float] = defaultdict(float)
    for result in tally.results:
        key = result.fault.part, result.fault.kind
        rows[key][result.outcome] += 1
        slowest[key] = max(slowest[key], result.seconds)
    outcomes = ("recovered", "failed_cleanly", "failed", "hang", "missed")
    lines = [
        f"# Chaos with seed {seed}",
        "",
        f"`{json.dumps(tally.line)}`",
        "",
        f"| part | fault | {' | '.join(outcomes)} | slowest, s |",
        f"|---|---|{'---|' * len(outcomes)}---|",
        *(
            f"| {' | '.join([*key, *(str(rows[key][outcome]) for outcome in outcomes)])} | {slowest[key]:.1f} |"
            for key in sorted(rows)
        ),
        "",
        "## What is wrong",
        "",
        *(f"- history: {fault}" for fault in tally.history.faults),
        *(f"- an end that no fault provoked: {said}" for said in tally.unprovoked),
        *(f"- {r.fault}: {r.outcome}: {r.reason}" for r in tally.results if r.outcome in ("failed", "hang")),
        *(f"- after {r.fault} stayed: {left}" for r in tally.results for left in r.left),
        *(["Nothing."] if tally.ok else []),
        "",
        "## Faults",
        "",
        *(f"{r.fault.number}. {r.fault}: {r.outcome} after {r.seconds:.1f} s. {r.reason}" for r in tally.results),
    ]
    return "\n".join(lines) + "\n"
