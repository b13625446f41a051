"""The `asyncrl` command. Heavy imports come after parsing, so `--help` answers at once."""

import sys
from io import TextIOWrapper
from typing import Annotated

import typer

from asyncrl import __version__
from asyncrl.engine.cli.config import show_config
from asyncrl.engine.cli.doctor import doctor
from asyncrl.engine.cli.eval import evaluate
from asyncrl.engine.cli.filters import app as filters_app
from asyncrl.engine.cli.generate import generate
from asyncrl.engine.cli.launch import app as launch_app
from asyncrl.engine.cli.ledger import ledger
from asyncrl.engine.cli.options import check_folder
from asyncrl.engine.cli.plan import app as plan_app
from asyncrl.engine.cli.prompts import prompts
from asyncrl.engine.cli.replay import replay
from asyncrl.engine.cli.simulate import simulate
from asyncrl.engine.cli.trace import app as trace_app
from asyncrl.engine.cli.train import train

app = typer.Typer(
    name="asyncrl",
    help="Asynchronous reinforcement learning for language models, with bounded staleness.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train")(train)
app.command("generate")(generate)
app.command("eval")(evaluate)
app.command("simulate")(simulate)
app.command("config")(show_config)
app.command("prompts")(prompts)
app.command("doctor")(doctor)
app.command("replay")(replay)
app.command("ledger")(ledger)
app.add_typer(filters_app, name="filters")
app.add_typer(plan_app, name="plan")
app.add_typer(launch_app, name="launch")
app.add_typer(trace_app, name="trace")


def _version(value: bool) -> None:
    if value:
        typer.echo(f"asyncrl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    check_folder()


def main() -> None:
    """Run the command line."""
    # A character that the terminal's encoding lacks would otherwise raise in the middle of a command.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    app()
