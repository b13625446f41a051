"""`asyncrl simulate`: predicts ages, throughput and waste of a configuration, in virtual time and without a model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncrl.engine.cli.options import (
    AllowCodeOption,
    ConfigOption,
    FilterOption,
    SetOption,
    fail,
    number,
    see_user_folder,
)
from asyncrl.engine.errors import ConfigError, TraceError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncrl.configs import Loaded, Override
    from asyncrl.engine.events.types import AnyEvent
    from asyncrl.engine.records import Prompt
    from asyncrl.engine.simulate.durations import Durations
    from asyncrl.engine.simulate.profile import Profile
    from asyncrl.engine.simulate.run import Prediction

_DATA_PROMPTS = 1000
"""Prompts of data sets that are simulated; their number matters little, and their texts not at all."""
_PLOTTED = ("mean_age", "groups_per_second", "trainer_idle", "generators_idle")


def simulate(
    config: ConfigOption = "default",
    from_: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN", help="A run's folder, for configuration, durations and rewards."),
    ] = None,
    group_seconds: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Seconds per group: a number, lognormal:mean,sigma, exponential:mean, …"),
    ] = None,
    step_seconds: Annotated[str | None, typer.Option(metavar="MODEL", help="Seconds per training step.")] = None,
    publish_seconds: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Seconds per publish; 0 by default.")
    ] = None,
    response_tokens: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Tokens per response; by default in proportion to its group's seconds."),
    ] = None,
    mixed_share: Annotated[
        float | None,
        typer.Option(
            parser=number(0, 1, kind=float), metavar="SHARE", help="Share of groups with mixed rewards; 1 by default."
        ),
    ] = None,
    failed_share: Annotated[
        float | None,
        typer.Option(parser=number(0, 1, kind=float), metavar="SHARE", help="Share of groups that fail; 0 by default."),
    ] = None,
    slots: Annotated[
        int, typer.Option(parser=number(0), metavar="N", help="Groups that a generator works on at once; 0: all.")
    ] = 0,
    generators: Annotated[str | None, typer.Option(metavar="N", help="Number of generators (collector.count).")] = None,
    ranks: Annotated[str | None, typer.Option(metavar="N", help="Number of trainer ranks (trainer.ranks).")] = None,
    steps: Annotated[str | None, typer.Option(metavar="N", help="End after this many training steps.")] = None,
    seed: Annotated[
        str | None, typer.Option(metavar="N", help="Seed of all random numbers; the same seed gives the same result.")
    ] = None,
    sweep: Annotated[
        str | None, typer.Option(metavar="NAME=V,V,…", help="Compare settings, for example max_staleness=0,1,2,4,8.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the sweep as bars in plain text.")] = None,
    filter_: FilterOption = None,
    set_: SetOption = None,
    allow_code: AllowCodeOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Predict ages, throughput, idle time and waste. Exit code 0: done; 1: a simulated run failed; 2: bad input."""
    from asyncrl.engine.simulate.sweep import Sweep, parse_sweep, table
    from asyncrl.engine.simulate.sweep import plot as draw

    given = [
        ("--generators", "collector.count", generators),
        ("--ranks", "trainer.ranks", ranks),
        ("--steps", "run.steps", steps),
        ("--seed", "run.seed", seed),
    ]
    told = {
        "--group-seconds": group_seconds,
        "--step-seconds": step_seconds,
        "--publish-seconds": publish_seconds,
        "--response-tokens": response_tokens,
        "--mixed-share": mixed_share,
        "--failed-share": failed_share,
    }
    if plot is not None and not plot.parent.is_dir():
        fail(f"--plot {plot}: the folder {plot.parent} does not exist")
    see_user_folder()
    try:
        recorded, events = recorded_run(from_)
        base = Base(config, recorded if config == "default" else [], _overrides(given, set_ or []), filter_ or [])
        allowed = allowed_code(from_, allow_code or [])
        loaded = base.load(allowed)
        profile = profile_of(loaded, events, from_, told)
        swept = parse_sweep(sweep, loaded.config) if sweep else Sweep("run.seed", [loaded.config.run.seed])
        settings = [base.load(allowed, value) for value in swept.overrides()]
    except ConfigError as error:
        fail(str(error))
    predictions = [predicted(setting, profile, slots) for setting in settings]
    rows = [(str(value), p.figures) for value, p in zip(swept.values, predictions, strict=True)]
    name = swept.path.rpartition(".")[2]
    if as_json:
        both = zip(swept.values, predictions, strict=True)
        typer.echo(json.dumps({name: [{"value": value, **p.figures} for value, p in both]}))
    else:
        typer.echo(table(name, rows))
        for (value, figures), prediction in zip(rows, predictions, strict=True):
            typer.echo(_waste(f"{name} {value}" if sweep else "in all", figures, prediction))
    if plot is not None:
        try:
            plot.write_text(draw(name, rows, _PLOTTED) + "\n", encoding="utf-8")
        except OSError as error:
            fail(f"--plot {plot} cannot be written: {error}")
    failed = [f"{name} {v}: {p.ending.reason}" for v, p in zip(swept.values, predictions, strict=True) if p.ending.code]
    for line in failed:
        typer.secho(f"error: {line}", fg=typer.colors.RED, err=True)
    raise typer.Exit(1 if failed else 0)


@dataclass(frozen=True, slots=True)
class Base:
    """What the settings of a sweep have in common: `recorded` is what a log says, and the rest the user's word."""

    config: str
    recorded: Sequence[Override]
    given: Sequence[Override]
    filters: Sequence[str]

    def load(self, allow_code: Sequence[str], *more: Override) -> Loaded:
        """Return the configuration with `more` on top; ConfigError if its values or its filters cannot work.

        ConfigError, too, if the log alone names the code of a filter, and `allow_code` does not.
        """
        from asyncrl.configs import load
        from asyncrl.configs.named_code import check_code, code_of
        from asyncrl.engine.running.checks import check_stale_mode
        from asyncrl.filters import build_chain

        given = [*self.given, *more]
        loaded = load(self.config, [*self.recorded, *given], self.filters)
        filters = loaded.config.filters
        allowed = [*allow_code, *self.filters, *code_of(given)]
        check_code({"filters": filters}, self.recorded, allowed=allowed, source="the run of --from")
        build_chain(filters, min_live=loaded.config.rollout.min_live)
        check_stale_mode(loaded)
        return loaded


def recorded_run(run: Path | None) -> tuple[Sequence[Override], Sequence[AnyEvent]]:
    """Return the configuration and the events of the run to fit; none without one."""
    if run is None:
        return [], []
    from asyncrl.engine.trace.recording import Recording

    try:
        recording = Recording.read(run)
    except TraceError as error:
        raise ConfigError(f"--from {error}") from error
    try:
        return recording.values(f"--from {run}"), recording.events
    except TraceError as error:
        raise ConfigError(f"--from {run}: {error}") from error


def allowed_code(run: Path | None, allow_code: Sequence[str]) -> list[str]:
    """Return the code that may be imported though the run's files name it: what the user names, now or in that run."""
    from asyncrl.engine.running.seal import sealed_code

    return [*allow_code, *(sealed_code(run) if run is not None else ())]


def _overrides(given: Sequence[tuple[str, str, str | None]], sets: Sequence[str]) -> list[Override]:
    from asyncrl.configs import Override, parse_set, parse_value

    values = [Override(path, parse_value(v, option), f"{option} {v}") for option, path, v in given if v is not None]
    return [*values, *map(parse_set, sets)]


def profile_of(
    loaded: Loaded,
    events: Sequence[AnyEvent],
    run: Path | None,
    told: Mapping[str, Any],
) -> Profile:
    """Build the profile from the run, or from the options in `told` (None if not given).

    ConfigError if one of them is missing, wrong or of no use beside the run.
    """
    if run is not None:
        from asyncrl.engine.simulate.fit import Fitted

        given = [option for option, value in told.items() if value is not None]
        if given:
            raise ConfigError(f"{given[0]} and --from exclude each other: with --from, durations come from the run")
        return Fitted(events, source=f"--from {run}")
    group, step = told["--group-seconds"], told["--step-seconds"]
    if group is None or step is None:
        missing = "--group-seconds" if group is None else "--step-seconds"
        raise ConfigError(f"{missing} is required, as in {missing} lognormal:1.0,0.5; or fit a run with --from RUN")
    from asyncrl.engine.simulate.durations import parse_durations
    from asyncrl.engine.simulate.profile import Given

    def model(option: str, otherwise: str) -> Durations:
        return parse_durations(otherwise if told[option] is None else told[option], option)

    response = "--response-tokens"
    return Given(
        prompts=_prompts(loaded),
        group_seconds=model("--group-seconds", ""),
        step_seconds_model=model("--step-seconds", ""),
        publish_seconds=model("--publish-seconds", "0"),
        response_tokens=None if told[response] is None else model(response, ""),
        max_new_tokens=loaded.config.rollout.max_new_tokens,
        mixed_share=1.0 if told["--mixed-share"] is None else told["--mixed-share"],
        failed_share=told["--failed-share"] or 0.0,
    )


def _prompts(loaded: Loaded) -> Sequence[Prompt]:
    """Return the prompts of task or environment, or the first _DATA_PROMPTS of the configured data sets.

    ConfigError if a data set cannot be read, or its prompts need a model that is not there.
    """
    from asyncrl.collectors.tasks.prepared import prepare_environment, prepare_task

    config = loaded.config
    environment, lists = config.environment, not config.data.given
    if environment.name is not None:
        task = prepare_environment(environment.name, environment.options, warm_up=False, lists=lists)
    else:
        task = prepare_task(config.task.name, config.task.options, warm_up=False, lists=lists)
    if not config.data.given:
        return task.prompts
    from asyncrl.collectors.data.prepare import with_data
    from asyncrl.engine.running.named_model import with_model_that_is_there

    # Prompts are put into the chat template of the model.
    stream = with_data(with_model_that_is_there(loaded, tell).config, task).stream
    assert stream is not None
    return list({prompt.id: prompt for prompt in islice(stream, min(_DATA_PROMPTS, stream.prompts))}.values())


def tell(line: str) -> None:
    """Print a line beside the results, which a program may read."""
    typer.echo(line, err=True)


def predicted(loaded: Loaded, profile: Profile, slots: int) -> Prediction:
    import logging

    import structlog

    from asyncrl.engine.simulate.run import predict

    # Simulated failures are counted in the table; as log lines they would flood the terminal.
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    try:
        return predict(loaded.config, profile, slots=slots)
    finally:
        structlog.configure(**before)


def _waste(title: str, figures: dict[str, Any], prediction: Prediction) -> str:
    ages = ", ".join(f"{age}: {n}" for age, n in figures["ages"].items()) or "-"
    lost = ", ".join(f"{fate} {share:.1%}" for fate, share in figures["lost"].items()) or "-"
    return (
        f"{title}: {figures['steps']} steps in {figures['seconds']:g} s ({prediction.ending.reason}); "
        f"trained ages (versions: samples) {ages}; lost {lost}; buffer at most {figures['buffer_max']}"
    )
