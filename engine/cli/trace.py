"""`asyncrl trace`: validates, prints, counts, slices and anonymises event logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl.engine.cli.options import fail, number

if TYPE_CHECKING:
    from asyncrl.engine.events.types import AnyEvent
    from asyncrl.engine.trace.cutting import Cut
    from asyncrl.engine.trace.recording import Recording

app = typer.Typer(
    help="Validate, print, count, slice and anonymise event logs.", no_args_is_help=True, add_completion=False
)

RunArgument = Annotated[str, typer.Argument(metavar="RUN_OR_LOG", help="A run's folder, or one file of its event log.")]
OutOption = Annotated[str, typer.Option("--out", metavar="FILE", help="The log to write; the file must not exist.")]
FromOption = Annotated[
    int | None, typer.Option("--from", metavar="SEQ", parser=number(0), help="Number of the first event.")
]
ToOption = Annotated[
    int | None, typer.Option("--to", metavar="SEQ", parser=number(0), help="Number of the last event.")
]
GroupOption = Annotated[
    list[int] | None, typer.Option("--group", parser=number(0), help="Only events of this group (repeatable).")
]
TypeOption = Annotated[list[str] | None, typer.Option("--type", help="Only events of this type (repeatable).")]

_SHOWN = 50


@app.command("validate")
def validate(run: RunArgument) -> None:
    """Check a log's format: numbers, times, order, digests and end. Exit code 1: something is wrong."""
    from asyncrl.engine.trace.validation import problems

    try:
        found = list(problems(Path(run)))
    except OSError as error:
        fail(f"trace validate {run}: {error}")
    for problem in found[:_SHOWN]:
        typer.echo(problem)
    if found:
        typer.echo(f"{len(found)} problems")
        raise typer.Exit(1)
    typer.echo(f"{run} is a valid log")


@app.command("cat")
def cat(
    run: RunArgument,
    first: FromOption = None,
    last: ToOption = None,
    group: GroupOption = None,
    type_: TypeOption = None,
) -> None:
    """Print events as JSON lines, from all segments, without those that a resume voided."""
    import msgspec

    cut = _cut(first, last, group, type_)
    for event in _read(run).events:
        if cut.keeps(event):
            typer.echo(msgspec.json.encode(event).decode())


@app.command("stats")
def stats(
    run: RunArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print the run's summary, as in summary.json.")] = False,
) -> None:
    """Count fates, ages, tokens and length bias from the log."""
    from asyncrl.engine.events.summary import Ends, summarise_log
    from asyncrl.engine.trace.report import RunReport, shown

    figures, ends = RunReport(), Ends()
    events = _read(run).events
    event = events[0]
    try:
        for event in events:
            figures.apply(event)
            ends.apply(event)
    except ValueError as error:
        fail(f"trace stats {run}: {error}; `asyncrl ledger {run}` names every such sample")
    except LookupError as error:
        fail(f"trace stats {run}: event {event.seq}, {event.__struct_config__.tag}: {error} does not exist")
    if as_json:
        typer.echo(json.dumps(summarise_log(figures.ledger, figures.progress, ends), indent=2))
        return
    lines = figures.lines()
    wide = max(len(name) for name, _ in lines)
    for name, value in lines:
        typer.echo(f"{name:<{wide}}  {shown(value)}")


@app.command("slice")
def slice_(
    run: RunArgument,
    out: OutOption,
    first: FromOption = None,
    last: ToOption = None,
    group: GroupOption = None,
    type_: TypeOption = None,
) -> None:
    """Write a part of a log, with the run's first event; the other events are unchanged."""
    from asyncrl.engine.trace.cutting import marked

    cut = _cut(first, last, group, type_)
    events = _read(run).events
    _write(out, marked([event for event in events if cut.keeps(event)], of=events))


@app.command("anonymise")
def anonymise(run: RunArgument, out: OutOption) -> None:
    """Write a copy without names, paths, texts and errors, which can be published and still replays."""
    from asyncrl.engine.trace.cutting import anonymised

    _write(out, list(anonymised(_read(run).events)))


def _read(run: str) -> Recording:
    from asyncrl.engine.errors import TraceError
    from asyncrl.engine.trace.recording import Recording

    try:
        return Recording.read(Path(run))
    except TraceError as error:
        fail(str(error))


def _cut(first: int | None, last: int | None, groups: list[int] | None, types: list[str] | None) -> Cut:
    from asyncrl.engine.events.types import AnyEvent
    from asyncrl.engine.trace.cutting import Cut

    known = sorted(str(kind.__struct_config__.tag) for kind in AnyEvent.__args__)
    unknown = [name for name in types or [] if name not in known]
    if unknown:
        fail(f"--type {unknown[0]} is not a type of event; the types are {', '.join(known)}")
    if first is not None and last is not None and first > last:
        fail(f"--from {first} comes after --to {last}")
    return Cut(first, last, frozenset(groups or []), frozenset(types or []))


def _write(out: str, events: list[AnyEvent]) -> None:
    from asyncrl.engine.trace.cutting import write_log

    if Path(out).exists():
        fail(f"--out {out} exists already; nothing was written")
    try:
        count = write_log(Path(out), events)
    except OSError as error:
        fail(f"--out {out} cannot be written: {error}")
    typer.echo(f"wrote {count} events to {out}")
