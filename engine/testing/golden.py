"""Golden traces: event logs beside tests, compared event by event."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from asyncrl.engine.events.log import read_events
from asyncrl.engine.events.types import AnyEvent, RunStarted
from asyncrl.engine.trace.cutting import write_log
from asyncrl.engine.trace.difference import differences, title


class TraceChanged(AssertionError):
    """A run no longer makes the events of its golden trace; the message shows the first that differs."""


def compare_with_golden(events: Sequence[AnyEvent], golden: Path, *, refresh: bool = False) -> None:
    """Check events against a golden log, or write it anew; times and the configuration are passed over.

    TraceChanged shows the events before the first difference, and both sides of it.
    """
    if refresh:
        golden.parent.mkdir(parents=True, exist_ok=True)
        write_log(golden, events)
        return
    if not golden.exists():
        raise TraceChanged(f"there is no golden trace {golden.name} yet; run pytest with --refresh-traces to write it")
    expected = list(read_events(golden))
    for place in range(max(len(expected), len(events))):
        before = expected[place] if place < len(expected) else None
        after = events[place] if place < len(events) else None
        if isinstance(before, RunStarted) and isinstance(after, RunStarted):
            continue
        if before is None or after is None or type(before) is not type(after) or differences(before, after):
            raise TraceChanged("\n".join(_shown(golden, events, place, before, after)))


def _shown(
    golden: Path, events: Sequence[AnyEvent], place: int, before: AnyEvent | None, after: AnyEvent | None
) -> list[str]:
    lines = [f"event {place + 1} is not that of the golden trace {golden.name}:"]
    lines += [f"    {_line(event)}" for event in events[max(0, place - 3) : place]]
    lines += [f"  - {_line(before)}", f"  + {_line(after)}"]
    if before is not None and after is not None and type(before) is type(after):
        lines += [f"  {difference}" for difference in differences(before, after)]
    return [*lines, "run pytest with --refresh-traces to accept it"]


def _line(event: AnyEvent | None) -> str:
    if event is None:
        return "(nothing)"
    fields = msgspec.to_builtins(event)
    rest = {name: value for name, value in fields.items() if name not in ("type", "seq", "t", "wall", "config")}
    text = f"{title(event)}  {rest}"
    return text if len(text) <= 160 else f"{text[:157]}..."
