"""`asyncrl generate`: answers from what a run has learned."""

import sys
from typing import Annotated

import typer

from asyncrl.engine.cli.options import fail, number


def generate(
    model: Annotated[
        str, typer.Argument(metavar="RUN_OR_MODEL", help="A run's folder, or a Hugging Face folder, such as RUN/model.")
    ],
    prompts: Annotated[
        list[str], typer.Argument(metavar="PROMPT...", help="Prompts; - takes one from each line of standard input.")
    ],
    best: Annotated[bool, typer.Option("--best", help="Answer from RUN/model-best instead of RUN/model.")] = False,
    max_new_tokens: Annotated[
        int, typer.Option(parser=number(1), metavar="N", help="Longest answer, in tokens.")
    ] = 256,
    temperature: Annotated[
        float, typer.Option(parser=number(0, kind=float), metavar="T", help="0 takes the likeliest token.")
    ] = 0.0,
    samples: Annotated[int, typer.Option(parser=number(1), metavar="N", help="Answers to each prompt.")] = 1,
    seed: Annotated[int, typer.Option(parser=number(0), metavar="N", help="Seed of sampling.")] = 0,
) -> None:
    """Print answers to prompts, as they are generated. Exit code 0: done; 1: not answered; 2: bad input.

    With several answers each has a line before it that says what it answers.
    """
    from asyncrl.engine.errors import ConfigError, GenerationError
    from asyncrl.engine.generate import generate as answer

    asked = [prompt for given in prompts for prompt in (_lines() if given == "-" else [given])]
    if not asked:
        fail("standard input has no prompt; write one per line")
    titled = len(asked) * samples > 1
    last: tuple[int, int] | None = None

    def show(prompt: int, sample: int, text: str) -> None:
        nonlocal last
        if (prompt, sample) != last:
            _begin(asked[prompt], sample if samples > 1 else None, titled=titled, first=last is None)
            last = prompt, sample
        typer.echo(text, nl=False)

    try:
        answer(
            model,
            asked,
            best=best,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            samples=samples,
            seed=seed,
            on_text=show,
        )
    except ConfigError as error:
        fail(str(error))
    except GenerationError as error:
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from error
    typer.echo()


def _lines() -> list[str]:
    return [line.rstrip("\r\n") for line in sys.stdin if line.strip()]


def _begin(prompt: str, sample: int | None, *, titled: bool, first: bool) -> None:
    if not first:
        typer.echo()
    if titled:
        typer.echo(f"# {prompt!r}" if sample is None else f"# {prompt!r}, sample {sample}")
