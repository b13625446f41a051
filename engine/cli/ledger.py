"""`asyncrl ledger`: proves that each sample of a run has exactly one fate, or names those that do not."""

from pathlib import Path
from typing import Annotated

import typer

from asyncrl.engine.cli.options import fail

_SHOWN = 50


def ledger(
    run: Annotated[str, typer.Argument(metavar="RUN_OR_LOG", help="A run's folder, or one file of its event log.")],
) -> None:
    """Prove that each sample has exactly one fate. Exit code 0: each has; 1: some have not; 2: bad input.

    For a log that breaks off, samples without a fate are named, nothing is proved, and the exit code is 2.
    """
    from asyncrl.engine.errors import TraceError
    from asyncrl.engine.trace.conservation import prove
    from asyncrl.engine.trace.recording import Recording

    try:
        recording = Recording.read(Path(run))
        recording.require_whole("the ledger")
    except TraceError as error:
        fail(str(error))
    proof = prove(recording.events)
    wide = max(map(len, proof.fates), default=0)
    for fate, count in sorted(proof.fates.items()):
        typer.echo(f"{fate:<{wide}}  {count}")
    faults = proof.faults()
    for fault in faults[:_SHOWN]:
        typer.echo(fault)
    if len(faults) > _SHOWN:
        typer.echo(f"and {len(faults) - _SHOWN} more")
    if faults:
        typer.echo(f"{len(faults)} faults in {proof.samples} samples")
    if recording.breaks_off:
        fail(f"ledger {run}: {recording.breaks_off}: it was killed, or still goes on; nothing is proved")
    if faults:
        raise typer.Exit(1)
    typer.echo(f"each of {proof.samples} samples has one fate")
