"""`asyncrl plan launch`: who would go where, what memory it takes, and which ages and throughput to expect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl.engine.cli.options import ConfigOption, FilterOption, SetOption, fail, number, resolve
from asyncrl.engine.cli.simulate import predicted, profile_of, recorded_run
from asyncrl.engine.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.configs import Loaded, RunConfig
    from asyncrl.engine.lifecycle.placement import Node, Request

_STEPS = 30
"""Steps that are simulated; the first ones are unlike the others."""


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
        Path | None, typer.Option("--from", metavar="RUN", help="Predict with the durations of this run.")
    ] = None,
    group_seconds: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Predict with these seconds per group (docs/simulate.md).")
    ] = None,
    step_seconds: Annotated[str | None, typer.Option(metavar="MODEL", help="Seconds per training step.")] = None,
    filter_: FilterOption = None,
    set_: SetOption = None,
) -> None:
    """Print places, memory, ages and throughput; start nothing. Exit code 0: it fits; 1: it does not; 2: bad input."""
    from asyncrl.engine.lifecycle.placement import DoesNotFit, Node, assign, requests_of

    given = [("--ray-address", "cluster.address", ray_address)]
    loaded = resolve(config, given, filter_ or [], set_ or [])
    run = loaded.config
    if run.cluster.time_slicing is not None:
        fail(
            f"cluster.time_slicing is {run.cluster.time_slicing!r}, and a plan is for a Ray cluster that is joined, "
            "where each part has its place all the time; it must be null. `asyncrl simulate` predicts such a run"
        )
    if ray_address is not None:
        found = _nodes_of(loaded, ray_address)
    else:
        room = {"CPU": node_cpus, "GPU": node_gpus, **({} if node_gib is None else {"memory": node_gib * 2**30})}
        found = [Node(str(i), f"node {i}", room, room, not i) for i in range(nodes)]
    requests = requests_of(run, found)
    try:
        places = assign(requests, found, layout=run.cluster.layout, most_nodes=run.cluster.nodes)
    except DoesNotFit as error:
        typer.secho(f"does not fit: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from None
    lines, tight = _picture(run, requests, places, gpu_gib)
    for line in lines:
        typer.echo(line)
    for line in _expected(loaded, from_, {"--group-seconds": group_seconds, "--step-seconds": step_seconds}):
        typer.echo(line)
    for line in tight:
        typer.secho(f"does not fit: {line}", fg=typer.colors.RED, err=True)
    raise typer.Exit(1 if tight else 0)


def _nodes_of(loaded: Loaded, address: str) -> list[Node]:
    """Return the nodes of a cluster, by joining it for a moment."""
    from asyncrl.engine.lifecycle.process_env import prepared
    from asyncrl.engine.running.cluster_checks import check_cluster

    try:
        check_cluster(loaded)
        with prepared(1, joins=address):
            from asyncrl.engine.lifecycle.joined import look_at_cluster

            return look_at_cluster(address)
    except ConfigError as error:
        fail(str(error))


def _picture(
    config: RunConfig, requests: Sequence[Request], places: Mapping[str, Node], gpu_gib: float | None
) -> tuple[list[str], list[str]]:
    """Return lines by node, and what has too little memory; parts with a GPU take its memory."""
    from asyncrl.engine.lifecycle.memory import GIB, memory_of_collector, memory_of_rank, total

    of_rank, of_collector = memory_of_rank(config), memory_of_collector(config)
    lines, tight = [], []
    for node in {node.id: node for node in places.values()}.values():
        here = [request for request in requests if places[request.part].id == node.id]
        room = node.total.get("memory")
        lines.append(
            f"{node.address}{' (driver)' if node.is_driver else ''}: {_use(here, node)}"
            + (f", {room / GIB:.1f} GiB" if room is not None else "")
        )
        for request in here:
            memory = of_rank if request.is_rank else of_collector
            parts = ", ".join(f"{name} {gib:.2g}" for name, gib in memory.items())
            lines.append(f"  {request}: {total(memory):.2g} GiB ({parts})")
            takes, has = total(memory, of_gpu=True), (gpu_gib or 0) * request.gpus
            if request.gpus and gpu_gib is not None and takes > has:
                tight.append(f"{request.part} takes {takes:.3g} GiB of a GPU, and has {has:.3g}")
        in_memory = sum(total(of_rank if one.is_rank else of_collector) for one in here if not one.gpus)
        if room is not None and in_memory * GIB > room:
            tight.append(f"the parts on {node.address} take {in_memory:.3g} GiB, and it has {room / GIB:.3g}")
    return lines, tight


def _use(here: Sequence[Request], node: Node) -> str:
    asked = {"CPU": sum(request.cpus for request in here), "GPU": sum(request.gpus for request in here)}
    return ", ".join(f"{amount:g} of {node.total.get(name, 0):g} {name}s" for name, amount in asked.items())


def _expected(loaded: Loaded, run: Path | None, told: Mapping[str, str | None]) -> Iterator[str]:
    """Yield what to expect of ages and throughput: simulated if durations are known, else the bounds alone."""
    rollout = loaded.config.rollout
    yield (
        f"ages at most {rollout.max_staleness} versions, run-ahead at most {loaded.config.run_ahead_groups} groups of "
        f"{rollout.group_size}"
    )
    if run is None and not any(told.values()):
        yield "for ages and throughput give --from RUN, or --group-seconds and --step-seconds (docs/simulate.md)"
        return
    others = ("--publish-seconds", "--response-tokens", "--mixed-share", "--failed-share")
    try:
        _, events = recorded_run(run)
        profile = profile_of(loaded, events, run, {**told, **dict.fromkeys(others)})
    except ConfigError as error:
        fail(str(error))
    steps = loaded.config.run.model_copy(update={"steps": _STEPS, "batches": None})
    figures = predicted(replace(loaded, config=loaded.config.model_copy(update={"run": steps})), profile, 0).figures
    if not figures["steps"]:
        yield "predicted: no step, since no group could be trained"
        return
    ages = ", ".join(f"{age}: {n}" for age, n in figures["ages"].items()) or "-"
    yield f"predicted: mean age {figures['mean_age']:.3g} (versions: samples {ages})"
    yield (
        f"predicted: {figures['seconds_per_step']:.3g} s per cycle, {figures['groups_per_second']:.3g} groups/s, "
        f"{figures['tokens_per_second']:.3g} tokens/s, trainer idle {figures['trainer_idle']:.0%}, "
        f"generators idle {figures['generators_idle']:.0%}"
    )
