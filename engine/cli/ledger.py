"""`asyncrl ledger`: proves that each sample of a run has one fate, or names those that do not."""

from pathlib import Path
from typing import Annotated

import typer

from asyncrl.engine.cli.options import fail

_SHOWN = 50


def ledger(
    run: Annotated[str, typer.Argument(metavar="RUN_OR_LOG", help="A run's folder, or one file of its event log.")],
) -> None:
    """Prove that each sample has one fate. Exit code 0: it has; 1: some have not; 2: bad input."""
    from asyncrl.engine.errors import TraceError
    from asyncrl.engine.trace.conservation import prove
    from asyncrl.engine.trace.recording import Recording

    try:
        recording = Recording.read(Path(run))
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
        more = "" if proof.ended else "; the log breaks off, so the run may have been killed or may still go on"
        typer.echo(f"{len(faults)} faults in {proof.samples} samples{more}")
        raise typer.Exit(1)
    typer.echo(f"each of {proof.samples} samples has one fate")
