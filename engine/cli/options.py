"""Options that commands share, and how they become a checked configuration."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from asyncrl.configs import Loaded, Override, load, parse_set, parse_value, preset_names
from asyncrl.configs.schema import Model
from asyncrl.engine.errors import ConfigError, FilterError

if TYPE_CHECKING:
    from asyncrl.collectors.tasks.prepared import PreparedTask

ConfigOption = Annotated[str, typer.Option("--config", help=f"A preset ({', '.join(preset_names())}) or a YAML file.")]
FilterOption = Annotated[
    list[str] | None,
    typer.Option("--filter", help="Append a filter, module:Class, to the chain (repeatable)."),
]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Set any value: section.key=value (repeatable).")]


_TEXT = ("run.directory", "run.runtime")


def resolve(
    config: str, options: Sequence[tuple[str, str, str | None]], filters: Sequence[str], sets: Sequence[str]
) -> "tuple[Loaded, PreparedTask]":
    """Load a configuration, and prepare its task; `options` are (option, path, value), unset where the value is None.

    Ends the process with code 2 and a message for whatever is wrong.
    """
    see_user_folder()
    try:
        # Values stay text until the schema has its say: one message, with the range, for every kind of mistake.
        overrides = [
            Override(path, value if path in _TEXT else parse_value(value, option), option)
            for option, path, value in options
            if value is not None
        ]
        loaded = load(config, [*overrides, *map(parse_set, sets)], filters)
        return loaded, check_runnable(loaded)
    except ConfigError as error:
        fail(str(error))


def see_user_folder() -> None:
    """Make modules of the user's folder importable; a console script does not. Last, so it shadows nothing."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


def check_folder() -> None:
    """End with code 2 where the working folder was deleted, which no command can work in."""
    try:
        Path.cwd()
    except OSError as error:
        fail(f"the working folder cannot be used: {error.strerror}; change to one that is there")


def check_runnable(loaded: Loaded) -> "PreparedTask":
    """Check what the configuration names: filters, task, devices, checkpoint, prompts. ConfigError if not.

    Returns the task, whose prompts the run goes on with: the user's code is not asked again.
    """
    from asyncrl.collectors.tasks.prepared import prepare_task
    from asyncrl.filters import build_chain

    config = loaded.config
    memory = config.data_plane.shared_memory
    if memory not in (None, "auto") and not (Path(memory).is_dir() and os.access(memory, os.W_OK | os.X_OK)):
        raise ConfigError(
            f"data_plane.shared_memory (from {loaded.sources['data_plane.shared_memory']}) is {memory!r}; "
            "it must be a directory that can be written to, auto, or null"
        )
    _check_devices(loaded)
    check_stale_mode(loaded)
    if config.rollout.stale_mode == "tokens":
        # Of every collector that there is so far; a simulation may suppose another.
        raise ConfigError(
            f"rollout.stale_mode (from {loaded.sources['rollout.stale_mode']}) is 'tokens'; it needs a generator that "
            "swaps weights within a response, and that of asyncrl train swaps between decode batches: all tokens of "
            "a response have one age, and those of an old one would all be withheld. It must be drop or gate"
        )
    try:
        build_chain(config.filters, min_live=config.rollout.min_live).state_dict()
    except FilterError as error:
        raise ConfigError(f"filters (from {loaded.sources['filters']}): {error}") from error
    prepared = prepare_task(config.task.name, config.task.options, warm_up=config.trainer.sft_warm_up_steps > 0)
    if config.model.path is not None:
        if not (Path(config.model.path) / "config.json").is_file():
            raise ConfigError(
                f"model.path (from {loaded.sources['model.path']}) is {config.model.path!r}; "
                "it must be a folder with a Hugging Face checkpoint (config.json)"
            )
        folder = Path(config.model.path)
        if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
            raise ConfigError(
                f"model.path (from {loaded.sources['model.path']}) is {config.model.path!r}; it must hold a "
                "tokenizer too (tokenizer.json or tokenizer_config.json)"
            )
    _check_extras(config.model, prepared.task.extras)
    if config.model.path is not None:
        from asyncrl.engine.lifecycle.checks import check_checkpoint

        check_checkpoint(config, prepared.prompts, extras=prepared.task.extras)
        return prepared
    from asyncrl.engine.model.tokenizer import CharTokenizer

    tokenizer = CharTokenizer()
    for prompt in prepared.prompts:
        try:
            tokenizer.encode(prompt.text)
        except ConfigError as error:
            raise ConfigError(f"task.name {config.task.name}: prompt {prompt.id!r}: {error}") from error
    for pair in prepared.examples:
        for text in pair:
            tokenizer.encode(text)
    return prepared


def check_stale_mode(loaded: Loaded) -> None:
    """Refuse what contradicts `stale_mode: tokens`, or does nothing beside it; ConfigError names both."""
    rollout = loaded.config.rollout
    if rollout.stale_mode != "tokens":
        return
    for name, value, off, why in (
        ("cancel_stale", rollout.cancel_stale, "false", "it would cancel groups whose newer tokens that mode trains"),
        ("requeue_tries", rollout.requeue_tries, "0", "that mode drops no group for its age, so none is issued again"),
    ):
        if value:
            raise ConfigError(
                f"rollout.{name} (from {loaded.sources[f'rollout.{name}']}) is {value!r} and rollout.stale_mode "
                f"'tokens'; {why}. It must be {off}, or the mode another"
            )


def _check_extras(model: Model, extras: Sequence[str]) -> None:
    """Look at the model's class, which takes seconds to import, only for a task that attaches extras."""
    if extras:
        from asyncrl.engine.model.causal_lm import outline_model
        from asyncrl.engine.model.tokenizer import CharTokenizer
        from asyncrl.trainers.extras import check_takes

        check_takes(outline_model(model, vocab_size=CharTokenizer.vocab_size), extras)


def _check_devices(loaded: Loaded) -> None:
    for section in (loaded.config.trainer, loaded.config.collector):
        if section.device != "cuda":
            continue
        import torch

        if not torch.cuda.device_count():
            path = f"{'trainer' if section is loaded.config.trainer else 'collector'}.device"
            raise ConfigError(
                f"{path} (from {loaded.sources[path]}) is 'cuda' and torch sees no GPU here; it must be auto or cpu"
            )


def fail(message: str) -> NoReturn:
    """Print what is wrong and end with code 2."""
    typer.secho(f"error: {message}", fg=typer.colors.RED, err=True)
    raise typer.Exit(2)
