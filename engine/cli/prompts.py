"""`asyncrl prompts`: a task's prompts as a file of records, to read, to change, or for a machine without its code."""

import json
from pathlib import Path
from typing import Annotated

import typer

from asyncrl.engine.cli.options import ConfigOption, SetOption, fail, resolve
from asyncrl.engine.errors import ConfigError


def prompts(
    file: Annotated[Path, typer.Argument(help="JSONL file to write; it must not exist.")],
    config: ConfigOption = "default",
    set_: SetOption = None,
) -> None:
    """Write the prompts of one epoch of a task or environment: id, prompt, answer, dataset.

    Exit code 0: done; 2: bad input.
    """
    from asyncrl.collectors.environments import load_environment
    from asyncrl.collectors.tasks import list_prompts, load_task

    resolved = resolve(config, (), (), set_ or []).config
    if resolved.data.given:
        fail("data.path or data.sets is given: those prompts are in files already, and a task's are what is written")
    option, name, options = "task.name", resolved.task.name, resolved.task.options
    if resolved.environment.name is not None:
        option, name, options = "environment.name", resolved.environment.name, resolved.environment.options
    try:
        task = load_environment(name, options) if option == "environment.name" else load_task(name, options)
        found = list_prompts(task, name, option=option)
        records = [
            json.dumps({"id": p.id, "prompt": p.text, "answer": p.answer, "dataset": p.dataset}, ensure_ascii=False)
            for p in found
        ]
        with file.open("x", encoding="utf-8") as stream:
            stream.writelines(f"{record}\n" for record in records)
    except ConfigError as error:
        fail(str(error))
    except TypeError as error:
        fail(f"{option} {name}: an answer is not text or another JSON value: {error}")
    except OSError as error:
        fail(f"{file} cannot be written: {error.strerror}")
    typer.echo(f"{len(records)} prompts of {name} are in {file}")
