"""`asyncrl replay`: makes a run's decisions again and compares them, or shows those of another configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl.engine.cli.options import AllowCodeOption, FilterOption, SetOption, fail, number, see_user_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncrl.engine.trace.recording import Recording
    from asyncrl.engine.trace.what_if import Answer


def replay(
    run: Annotated[str, typer.Argument(metavar="RUN_OR_LOG", help="A run's folder, or one file of its event log.")],
    max_staleness: Annotated[
        str | None, typer.Option(metavar="N", help="Show what this bound on age would have decided.")
    ] = None,
    filter_: FilterOption = None,
    set_: SetOption = None,
    allow_code: AllowCodeOption = None,
    step: Annotated[
        int | None, typer.Option(parser=number(0), metavar="N", help="Rebuild the loss inputs of this step.")
    ] = None,
    out: Annotated[str | None, typer.Option(metavar="FILE", help="File that --step writes (safetensors).")] = None,
) -> None:
    """Judge and plan a recorded run again. Exit code 0: identical, or a what-if; 1: a difference; 2: bad input.

    A log that breaks off is compared as far as it goes, and the exit code is 2.
    """
    from asyncrl.configs import Override, parse_set, parse_value
    from asyncrl.configs.named_code import code_of
    from asyncrl.engine.errors import AsyncRLError
    from asyncrl.engine.running.seal import sealed_code
    from asyncrl.engine.trace.recording import Recording

    if (step is None) != (out is None):
        fail("--step and --out go together: --step 12 --out step12.safetensors")
    see_user_folder()
    try:
        overrides = [parse_set(text) for text in set_ or []]
        if max_staleness is not None:
            option = "--max-staleness"
            overrides.insert(0, Override("rollout.max_staleness", parse_value(max_staleness, option), option))
        recording = Recording.read(Path(run))
        allowed = [*(allow_code or []), *sealed_code(Path(run))]
        if overrides or filter_:
            from asyncrl.engine.trace.what_if import what_if

            if step is not None:
                fail("--step rebuilds what was trained; it cannot be combined with a what-if")
            other = recording.config(overrides, filter_ or [])
            allowed += [*(filter_ or []), *code_of(overrides)]
            _print(what_if(recording, other, allow_code=allowed), recording.breaks_off)
            return
        code = _replay(recording, Path(run), allowed, step, out)
    except AsyncRLError as error:
        fail(str(error))
    raise typer.Exit(code)


def _replay(recording: Recording, run: Path, allow_code: Sequence[str], step: int | None, out: str | None) -> int:
    from asyncrl.engine.events.types import Judged, Planned, Settled
    from asyncrl.engine.trace.replay import rank_works, replay

    replayed = replay(recording, allow_code=allow_code)
    if replayed.difference is not None:
        typer.echo(f"the replay differs at {replayed.difference}")
        return 1
    counts = ", ".join(
        f"{sum(isinstance(event, kind) for event in recording.events)} {name}"
        for kind, name in ((Judged, "verdicts"), (Planned, "plans"), (Settled, "fates of groups"))
    )
    if recording.breaks_off:
        typer.echo(f"no difference as far as the log goes: {counts} of {len(recording.events)} events")
        fail(f"replay {run}: {recording.breaks_off}; what came after is not proved")
    typer.echo(f"identical: {counts} of {len(recording.events)} events")
    if step is not None and out is not None:
        from safetensors import SafetensorError

        from asyncrl.engine.trace.loss_inputs import save
        from asyncrl.engine.trace.tensors import rebuild

        inputs = rebuild(run if run.is_dir() else run.parent, rank_works(replayed, step))
        try:
            save(inputs, Path(out))
        except (OSError, SafetensorError) as error:
            fail(f"--out {out} cannot be written: {error}")
        shapes = ", ".join(str(len(rank)) for rank in inputs.rows)
        typer.echo(f"wrote {out}: step {step}, micro-batches by rank {shapes}, {inputs.total_tokens} trained tokens")
    return 0


def _print(answer: Answer, breaks_off: str) -> None:
    from asyncrl.engine.trace.report import side_by_side
    from asyncrl.engine.trace.what_if import LIMIT

    rows: Sequence[tuple[str, str, str]] = [("", "before", "after"), *side_by_side(answer.before, answer.after)]
    wide = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, before, after in rows:
        mark = "" if before == after or not name else "  *"
        typer.echo(f"{name:<{wide[0]}}  {before:>{wide[1]}}  {after:>{wide[2]}}{mark}")
    typer.echo(f"\n{LIMIT}")
    if breaks_off:
        typer.echo(f"Both columns end where the log does: {breaks_off}.")
    if answer.note:
        typer.echo(f"It ended early: {answer.note}")
