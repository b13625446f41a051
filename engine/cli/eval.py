"""`asyncrl eval`: how good a model is on prompts that it was not trained on."""

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl.configs import preset_names
from asyncrl.engine.cli.options import (
    AllowCodeOption,
    RewardOption,
    SetOption,
    fail,
    overrides,
    resolve,
    see_user_folder,
)

if TYPE_CHECKING:
    from asyncrl.engine.evaluate import Evaluation
    from asyncrl.engine.records.scores import Scores


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_RUN", help="A run's folder, a Hugging Face folder such as RUN/model, or smollm2."
        ),
    ],
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            help=f"A preset ({', '.join(preset_names())}) or a YAML file; by default what the run was configured with.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Prompts: a .jsonl or .parquet file, or a data set of `datasets`."),
    ] = None,
    samples: Annotated[str | None, typer.Option(metavar="N", help="Responses per prompt.")] = None,
    temperature: Annotated[str | None, typer.Option(metavar="T", help="0 takes the likeliest token.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Evaluate RUN/model-best instead of RUN/model.")] = False,
    reward: RewardOption = None,
    set_: SetOption = None,
    allow_code: AllowCodeOption = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Evaluate a model: pass@k and mean reward, by data set. Exit code 0: done; 1: not scored; 2: bad input."""
    from asyncrl.engine.errors import ConfigError, GenerationError, Overdue
    from asyncrl.engine.evaluate import evaluate as evaluated
    from asyncrl.engine.evaluate import recorded_config
    from asyncrl.engine.running.logs import log_to_standard_error

    options = [
        ("--data", "evaluation.path", data),
        ("--samples", "evaluation.samples", samples),
        ("--temperature", "evaluation.temperature", temperature),
    ]
    try:
        if config is not None:
            loaded = resolve(config, options, (), set_ or [], rewards=reward or [])
        else:
            see_user_folder()
            given, rewards = overrides(options, set_ or []), reward or []
            loaded = recorded_config(model, given, rewards=rewards, allow_code=allow_code or [])
        with log_to_standard_error():
            found = evaluated(model, config=loaded, best=best)
    except ConfigError as error:
        fail(str(error))
    except (GenerationError, Overdue) as error:
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from error
    if json_:
        typer.echo(json.dumps(found.to_dict(), allow_nan=False))
    else:
        _show(found)


def _show(found: "Evaluation") -> None:
    from rich.console import Console
    from rich.table import Table

    of = "" if found.version is None else f" (version {found.version})"
    how = "greedy" if not found.temperature else f"temperature {found.temperature:g}, {found.samples} samples"
    typer.echo(f"{found.model}{of}, {how}, passed at reward {found.pass_reward:g}, {found.seconds:.1f} s")
    table = Table(box=None, pad_edge=False)
    ks = list(found.scores.pass_at)
    for name in ("data set", "prompts", *(f"pass@{k} (95 %)" for k in ks), "reward (95 %)", "tokens", "cut", "failed"):
        table.add_column(name, justify="left" if name == "data set" else "right", no_wrap=True)
    rows = dict(found.datasets) if len(found.datasets) > 1 else {}
    for name, scores in {**rows, "all": found.scores}.items():
        table.add_row(name, *_cells(scores, ks))
    Console(width=None if sys.stdout.isatty() else 200).print(table, highlight=False, markup=False)


def _cells(scores: "Scores", ks: list[str]) -> list[str]:
    from asyncrl.engine.cli.view import estimate, number

    return [
        str(scores.prompts),
        *(estimate(scores.pass_at.get(k)) for k in ks),
        estimate(scores.reward),
        number(scores.tokens, 1),
        "-" if scores.truncated is None else f"{scores.truncated:.1%}",
        str(scores.failed_samples),
    ]
