"""`asyncrl plan show`: a picture of a step's plan, ranks as rows and micro-batches as blocks."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from asyncrl.engine.cli.options import fail

app = typer.Typer(help="Look at how a step was packed onto its ranks.", no_args_is_help=True, add_completion=False)

_WIDTH = 60


@app.callback()
def _plan() -> None:
    pass


@app.command("show")
def show(
    run: Annotated[str, typer.Argument(help="A run's folder.")],
    step: Annotated[int | None, typer.Option(help="Which step; the last one if not given.")] = None,
) -> None:
    """Print tokens by rank and micro-batch, and how even the ranks were, as planned and as timed."""
    from asyncrl.engine.events.log import read_events
    from asyncrl.engine.events.types import Planned, Put, StepEnded
    from asyncrl.engine.records.keys import row_of

    path = Path(run)
    if not path.exists():
        fail(f"plan show {run}: there is no such folder")
    lengths: dict[str, int] = {}
    plans: dict[int, Planned] = {}
    ended: dict[int, StepEnded] = {}
    for event in read_events(path):
        match event:
            case Put():
                prompt = event.tags["prompt_tokens"]
                lengths.update(
                    (key, prompt + n) for key, n in zip(event.keys, event.tags["response_tokens"], strict=True)
                )
            case Planned():
                plans[event.step] = event
            case StepEnded():
                ended[event.step] = event
    if not plans:
        fail(f"plan show {run}: the run has no step")
    wanted = max(plans) if step is None else step
    if wanted not in plans:
        fail(f"plan show --step {wanted}: the run has steps {min(plans)} to {max(plans)}")
    plan = plans[wanted]
    loads = [[sum(lengths[key] for key in keys) for keys in rank] for rank in plan.ranks]
    longest = max(1, *(sum(rank) for rank in loads))
    typer.echo(f"step {wanted}: {len(plan.ranks)} ranks, {len(loads[0])} micro-batches each, {plan.fillers} fillers")
    for number, rank in enumerate(loads):
        blocks = "".join(f"[{'#' * max(1, round(tokens * _WIDTH / longest) - 2)}]" for tokens in rank)
        typer.echo(f"rank {number:>3}  {sum(rank):>8} tokens  {blocks}")
    groups = [{row_of(key) for keys in rank for key in keys} for rank in plan.ranks]
    typer.echo(f"a group is read by {sum(map(len, groups)) / len(set().union(*groups)):.2f} ranks")
    if wanted in ended:
        for line in _measured(ended[wanted].metrics, ended[wanted].seconds):
            typer.echo(line)


def _measured(figures: Mapping[str, float], seconds: float) -> Iterator[str]:
    """Say how the step went, beside what was predicted; what its log does not know is left out."""
    from asyncrl.engine import metrics

    yield (
        f"costliest rank over the mean: {figures.get(metrics.PLANNED_IMBALANCE, 1.0):.4f} planned, "
        f"{figures.get(metrics.MEASURED_IMBALANCE, 1.0):.4f} timed; step took {seconds:.3f} s"
    )
    if figures.get(metrics.RANK_SECONDS):
        guess = figures.get(metrics.PREDICTED_SECONDS)
        predicted = f"{guess:.3f} s predicted, " if guess else ""
        yield (
            f"slowest rank: {predicted}{figures[metrics.RANK_SECONDS]:.3f} s measured; "
            f"of the ranks' time {figures.get(metrics.BUBBLE_FRACTION, 0.0):.1%} waiting for it"
        )
        yield (
            f"fillers are {figures.get(metrics.FILLER_FRACTION, 0.0):.1%} of the cost, "
            f"padding {figures.get(metrics.PADDING_FRACTION, 0.0):.1%} of the positions"
        )
