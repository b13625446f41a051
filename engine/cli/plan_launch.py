"""`asyncrl plan launch`: who would go where, what memory it takes, and which ages and throughput to expect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl.engine.cli.options import (
    AllowCodeOption,
    ConfigOption,
    FilterOption,
    SetOption,
    fail,
    number,
    overrides,
    see_user_folder,
)
from asyncrl.engine.cli.simulate import Base, allowed_code, predicted, profile_of, recorded_run, tell
from asyncrl.engine.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.configs import Loaded, Override, RunConfig
    from asyncrl.engine.events.types import AnyEvent
    from asyncrl.engine.lifecycle.placement import Node, Request
    from asyncrl.engine.simulate.run import Prediction

_STEPS = 30
"""Steps that are simulated; the first ones are unlike the others."""
_PLACE = ("run.runtime", "cluster.address")
"""Values of a recorded run that say where it was."""


def launch(
    config: ConfigOption = "default",
    ray_address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT|auto", help="Plan for the nodes of this Ray cluster.")
    ] = None,
    nodes: Annotated[int, typer.Option(parser=number(1, 4096), metavar="N", help="Plan for so many nodes.")] = 1,
    node_cpus: Annotated[float, typer.Option(parser=number(1, kind=float), metavar="N", help="CPUs of each.")] = 8,
    node_gpus: Annotated[float, typer.Option(parser=number(0, kind=float), metavar="N", help="GPUs of each.")] = 0,
    node_gib: Annotated[
        float | None, typer.Option(parser=number(0, kind=float), metavar="GIB", help="Memory of each node.")
    ] = None,
    gpu_gib: Annotated[
        float | None, typer.Option(parser=number(0, kind=float), metavar="GIB", help="Memory of each GPU.")
    ] = None,
    from_: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN", help="Plan for this run's configuration, with its durations."),
    ] = None,
    group_seconds: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Predict with these seconds per group (docs/simulate.md).")
    ] = None,
    step_seconds: Annotated[str | None, typer.Option(metavar="MODEL", help="Seconds per training step.")] = None,
    filter_: FilterOption = None,
    set_: SetOption = None,
    allow_code: AllowCodeOption = None,
) -> None:
    """Print places, memory, ages and throughput; start nothing.

    Exit code 0: it fits; 1: it does not, or the predicted run fails; 2: bad input.
    """
    from asyncrl.engine.lifecycle.placement import DoesNotFit, Node, assign, requests_of

    given = overrides([("--ray-address", "cluster.address", ray_address)], set_ or [])
    told = {"--group-seconds": group_seconds, "--step-seconds": step_seconds}
    see_user_folder()
    try:
        recorded, events = recorded_run(from_)
        base = Base(config, _without_place(recorded) if config == "default" else [], given, filter_ or [])
        loaded = _checked(base.load(allowed_code(from_, allow_code or [])))
        run = loaded.config
        prediction = _prediction(loaded, events, from_, told)
        memory = _Memory.of(run)
        if run.cluster.address is not None:
            found = _nodes_of(loaded, run.cluster.address)
        else:
            room = {"CPU": node_cpus, "GPU": node_gpus, **({} if node_gib is None else {"memory": node_gib * 2**30})}
            found = [Node(str(i), f"node {i}", room, room, not i) for i in range(nodes)]
    except ConfigError as error:
        fail(str(error))
    requests = requests_of(run, found)
    try:
        places = assign(requests, found, layout=run.cluster.layout, most_nodes=run.cluster.nodes)
    except DoesNotFit as error:
        typer.secho(f"does not fit: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from None
    lines, wrong = _picture(memory, requests, places, gpu_gib)
    for line in [*lines, *_expected(run, prediction)]:
        typer.echo(line)
    if prediction is not None and prediction.ending.code:
        wrong.append(f"error: the predicted run fails: {prediction.ending.reason}")
    for line in wrong:
        typer.secho(line, fg=typer.colors.RED, err=True)
    raise typer.Exit(1 if wrong else 0)


def _without_place(recorded: Sequence[Override]) -> list[Override]:
    """Return a recorded configuration without where the run was: a plan is for another place."""
    return [value for value in recorded if value.path not in _PLACE]


def _checked(loaded: Loaded) -> Loaded:
    """Return the configuration with the folder of its model; ConfigError for what a cluster or Megatron cannot run."""
    from asyncrl.engine.running.megatron_checks import check_megatron_model, check_megatron_options
    from asyncrl.engine.running.named_model import with_model_that_is_there

    run, sources = loaded.config, loaded.sources
    if run.run.runtime != "ray":
        raise ConfigError(
            f"run.runtime (from {sources['run.runtime']}) is {run.run.runtime!r}, in which all is one process, and a "
            "plan is for a Ray cluster; it must be ray, or left out"
        )
    if run.cluster.time_slicing is not None:
        raise ConfigError(
            f"cluster.time_slicing (from {sources['cluster.time_slicing']}) is {run.cluster.time_slicing!r}, and a "
            "plan is for a Ray cluster that is joined, where each part has its place all the time; it must be null. "
            "`asyncrl simulate` predicts such a run"
        )
    check_megatron_options(loaded)
    loaded = with_model_that_is_there(loaded, tell)
    check_megatron_model(loaded, ())
    return loaded


def _nodes_of(loaded: Loaded, address: str) -> list[Node]:
    """Return the nodes of a cluster, by joining it for a moment. ConfigError if it does not answer."""
    from asyncrl.engine.lifecycle.process_env import prepared
    from asyncrl.engine.running.cluster_checks import check_cluster

    check_cluster(loaded)
    with prepared(1, joins=address):
        from asyncrl.engine.lifecycle.joined import look_at_cluster

        return look_at_cluster(address)


@dataclass(frozen=True, slots=True)
class _Memory:
    """The GiB of a rank and of a collector, by purpose."""

    of_rank: Mapping[str, float]
    of_collector: Mapping[str, float]

    @classmethod
    def of(cls, config: RunConfig) -> _Memory:
        """Estimate from the model's configuration; ConfigError if it describes no model, or no layer to adapt."""
        from asyncrl.engine.lifecycle.memory import memory_of_collector, memory_of_rank

        return cls(memory_of_rank(config), memory_of_collector(config))

    def of_part(self, request: Request) -> Mapping[str, float]:
        return self.of_rank if request.is_rank else self.of_collector


def _picture(
    memory: _Memory, requests: Sequence[Request], places: Mapping[str, Node], gpu_gib: float | None
) -> tuple[list[str], list[str]]:
    """Return lines by node, and what has too little memory; parts with a GPU take its memory."""
    from asyncrl.engine.lifecycle.memory import GIB, total

    lines, tight = [], []
    for node in {node.id: node for node in places.values()}.values():
        here = [request for request in requests if places[request.part].id == node.id]
        room = node.total.get("memory")
        lines.append(
            f"{node.address}{' (driver)' if node.is_driver else ''}: {_use(here, node)}"
            + (f", {room / GIB:.1f} GiB" if room is not None else "")
        )
        for request in here:
            part = memory.of_part(request)
            purposes = ", ".join(f"{name} {gib:.2g}" for name, gib in part.items())
            lines.append(f"  {request}: {total(part):.2g} GiB ({purposes})")
            takes, has = total(part, of_gpu=True), (gpu_gib or 0) * request.gpus
            if request.gpus and gpu_gib is not None and takes > has:
                tight.append(f"does not fit: {request.part} takes {takes:.3g} GiB of a GPU, and has {has:.3g}")
        in_memory = sum(total(memory.of_part(one)) for one in here if not one.gpus)
        if room is not None and in_memory * GIB > room:
            tight.append(
                f"does not fit: the parts on {node.address} take {in_memory:.3g} GiB, and it has {room / GIB:.3g}"
            )
    return lines, tight


def _use(here: Sequence[Request], node: Node) -> str:
    asked = {"CPU": sum(request.cpus for request in here), "GPU": sum(request.gpus for request in here)}
    return ", ".join(f"{amount:g} of {node.total.get(name, 0):g} {name}s" for name, amount in asked.items())


def _prediction(
    loaded: Loaded, events: Sequence[AnyEvent], run: Path | None, told: Mapping[str, str | None]
) -> Prediction | None:
    """Simulate _STEPS steps; None if no durations are known. ConfigError if they cannot be used."""
    if run is None and not any(told.values()):
        return None
    others = ("--publish-seconds", "--response-tokens", "--mixed-share", "--failed-share")
    profile = profile_of(loaded, events, run, {**told, **dict.fromkeys(others)})
    steps = loaded.config.run.model_copy(update={"steps": _STEPS, "batches": None})
    return predicted(replace(loaded, config=loaded.config.model_copy(update={"run": steps})), profile, 0)


def _expected(config: RunConfig, prediction: Prediction | None) -> Iterator[str]:
    """Yield what to expect of ages and throughput: as predicted, else the bounds alone."""
    rollout = config.rollout
    yield (
        f"ages at most {rollout.max_staleness} versions, run-ahead at most {config.run_ahead_groups} groups of "
        f"{rollout.group_size}"
    )
    if prediction is None:
        yield "for ages and throughput give --from RUN, or --group-seconds and --step-seconds (docs/simulate.md)"
        return
    figures = prediction.figures
    if not figures["steps"]:
        if not prediction.ending.code:
            yield "predicted: no step, since no group could be trained"
        return
    ages = ", ".join(f"{age}: {n}" for age, n in figures["ages"].items()) or "-"
    yield f"predicted: mean age {figures['mean_age']:.3g} (versions: samples {ages})"
    rates = {name: _figure(figures[name]) for name in ("cycle_seconds", "groups_per_second", "tokens_per_second")}
    yield (
        f"predicted: {rates['cycle_seconds']} s per cycle, {rates['groups_per_second']} groups/s, "
        f"{rates['tokens_per_second']} tokens/s, trainer idle {_figure(figures['trainer_idle'], '.0%')}, "
        f"generators idle {_figure(figures['generators_idle'], '.0%')}"
    )


def _figure(value: float | None, form: str = ".3g") -> str:
    """Format a figure; one per second is not known where all durations are 0."""
    return "-" if value is None else format(value, form)
