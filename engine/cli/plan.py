"""`asyncrl plan`: `launch` tells what would run where, and `show` draws a step's plan.

In the picture ranks are rows, micro-batches are blocks, and a bar stands between updates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl.engine.cli.options import fail, number
from asyncrl.engine.cli.plan_launch import launch

if TYPE_CHECKING:
    from asyncrl.engine.events.types import Planned, StepEnded

app = typer.Typer(
    help="Plan where a run goes; show how the samples of a step were planned onto ranks.",
    no_args_is_help=True,
    add_completion=False,
)

_WIDTH = 60


app.command("launch")(launch)


@app.callback()
def _plan() -> None:
    pass


@app.command("show")
def show(
    run: Annotated[str, typer.Argument(help="A run's folder.")],
    step: Annotated[
        int | None, typer.Option(parser=number(0), metavar="N", help="The step to show; the last one by default.")
    ] = None,
) -> None:
    """Print tokens by rank and micro-batch, and the time and balance of the ranks, as planned and as measured.

    A block of dots is a filler; a bar stands between optimizer updates.
    """
    from asyncrl.engine.errors import TraceError
    from asyncrl.engine.events.types import Planned, Put, StepEnded
    from asyncrl.engine.trace.recording import Recording

    if not Path(run).exists():
        fail(f"plan show {run}: the folder does not exist")
    try:
        events = Recording.read(Path(run)).events
    except TraceError as error:
        fail(f"plan show: {error}")
    lengths: dict[str, int] = {}
    plans: dict[int, Planned] = {}
    ended: dict[int, StepEnded] = {}
    for event in events:
        match event:
            case Put(tags={"prompt_tokens": prompt, "response_tokens": responses}):
                lengths.update((key, prompt + n) for key, n in zip(event.keys, responses, strict=True))
            case Planned():
                plans[event.step] = event
            case StepEnded():
                ended[event.step] = event
    if not plans:
        fail(f"plan show {run}: the run has no step")
    wanted = max(plans) if step is None else step
    if wanted not in plans:
        fail(f"plan show --step {wanted}: the run has steps {min(plans)} to {max(plans)}")
    unknown = [key for rank in plans[wanted].ranks for keys in rank for key in keys if key not in lengths]
    if unknown or not any(plans[wanted].ranks):
        what = f"no put of {unknown[0]} with its tokens" if unknown else "no micro-batch"
        fail(f"plan show --step {wanted}: the log has {what}; it is not complete, or the plan was changed")
    for line in _picture(plans[wanted], lengths, ended.get(wanted)):
        typer.echo(line)
    if wanted in ended:
        for line in _measured(ended[wanted].metrics, ended[wanted].seconds):
            typer.echo(line)


def _picture(plan: Planned, lengths: Mapping[str, int], ended: StepEnded | None) -> Iterator[str]:
    """Draw a plan; `lengths` are tokens by key."""
    from asyncrl.engine.records.keys import row_of

    updates = plan.updates or [len(plan.ranks[0])]
    micro_batches = f"{sum(updates)} micro-batches each{f' in {len(updates)} updates' if len(updates) > 1 else ''}"
    yield f"step {plan.step}: {len(plan.ranks)} ranks, {micro_batches}, {plan.fillers} fillers"
    loads = [[sum(lengths[key] for key in keys) for keys in rank] for rank in plan.ranks]
    longest = max(1, *(sum(rank) for rank in loads))
    fillers = set(plan.filler_places) or _guessed_fillers(plan, updates)
    drawn = []
    for index, rank in enumerate(loads):
        blocks = [
            f"[{('.' if (index, place) in fillers else '#') * max(1, round(tokens * _WIDTH / longest) - 2)}]"
            for place, tokens in enumerate(rank)
        ]
        drawn.append(" | ".join("".join(blocks[end - count : end]) for count, end in _ends(updates)))
    for index, blocks_of_rank in enumerate(drawn):
        row = f"rank {index:>3}  {sum(loads[index]):>8} tokens  {blocks_of_rank.ljust(max(map(len, drawn)))}"
        yield f"{row}{_seconds(ended, index)}".rstrip()
    groups = [{row_of(key) for keys in rank for key in keys} for rank in plan.ranks]
    yield f"a group is read by {sum(map(len, groups)) / len(set().union(*groups)):.2f} ranks"


def _ends(updates: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the number of micro-batches of each update, and the position where they end."""
    end = 0
    for count in updates:
        end += count
        yield count, end


def _guessed_fillers(plan: Planned, updates: Sequence[int]) -> set[tuple[int, int]]:
    """Guess the fillers of an older log: what repeats a key of its update; of two equal micro-batches, the later."""
    found = set()
    for count, end in _ends(updates):
        part = [(rank, place) for place in range(end - count, end) for rank in range(len(plan.ranks))]
        seen = {key for rank, place in part if len(plan.ranks[rank][place]) > 1 for key in plan.ranks[rank][place]}
        for rank, place in part:
            keys = plan.ranks[rank][place]
            if len(keys) == 1 and keys[0] in seen:
                found.add((rank, place))
            seen.update(keys)
    return found


def _seconds(ended: StepEnded | None, rank: int) -> str:
    """Return a rank's measured and predicted seconds as text; empty if an older log does not have them."""
    if ended is None or not ended.rank_seconds:
        return ""
    predicted = f"{ended.predicted_seconds[rank]:.3f} s predicted, " if ended.predicted_seconds else ""
    return f"  {predicted}{ended.rank_seconds[rank]:.3f} s measured"


def _measured(figures: Mapping[str, float], seconds: float) -> Iterator[str]:
    """Yield the measured figures of the step beside the predicted ones, without those that the log lacks."""
    from asyncrl.engine import metrics

    yield (
        f"costliest rank over the mean: {figures.get(metrics.PLANNED_IMBALANCE, 1.0):.4f} planned, "
        f"{figures.get(metrics.MEASURED_IMBALANCE, 1.0):.4f} measured; step took {seconds:.3f} s"
    )
    if figures.get(metrics.RANK_SECONDS):
        guess = figures.get(metrics.PREDICTED_SECONDS)
        predicted = f"{guess:.3f} s predicted, " if guess else ""
        yield (
            f"slowest rank: {predicted}{figures[metrics.RANK_SECONDS]:.3f} s measured; "
            f"ranks wait for it during {figures.get(metrics.BUBBLE_FRACTION, 0.0):.1%} of their time"
        )
        yield (
            f"fillers are {figures.get(metrics.FILLER_FRACTION, 0.0):.1%} of the cost, "
            f"padding {figures.get(metrics.PADDING_FRACTION, 0.0):.1%} of the positions"
        )
