"""A run's data before anything starts: opened, looked at, and made into the stream that the run draws from."""

import re
from dataclasses import replace
from itertools import islice
from pathlib import Path

from asyncrl.collectors.data.check import CHECKED_RECORDS, check_prompts
from asyncrl.collectors.data.columns import Columns
from asyncrl.collectors.data.open import open_sets, open_shots
from asyncrl.collectors.data.prompts import DataPrompts, Limits
from asyncrl.collectors.data.renderer import Renderer
from asyncrl.collectors.environments.tools import Tools, schemas
from asyncrl.collectors.tasks.prepared import PreparedTask
from asyncrl.configs import RunConfig
from asyncrl.engine.errors import ConfigError, DataError
from asyncrl.engine.model.hub import source_of
from asyncrl.engine.model.tokenizer import is_built_in, load_tokenizer

_CHATS = re.compile(r"instruct|chat|(^|[-_])it([-_.]|$)", re.IGNORECASE)
"""Names of models that were trained on chats, as on the Hugging Face Hub: `Qwen3-4B-Instruct`, `gemma-3-1b-it`."""


def with_data(config: RunConfig, prepared: PreparedTask) -> PreparedTask:
    """Return a task whose prompts come from the configured data sets.

    ConfigError if a set cannot be opened, a record of those looked at is bad, or the length of prompts is not known.
    """
    data = config.data
    try:
        prompts = _opened(config, prepared.tools)
        checked = check_prompts(prompts)
        if not checked.whole and data.max_prompt_tokens is None and config.collector.slot_tokens is None:
            raise ConfigError(
                f"data has a set of more than {CHECKED_RECORDS:,} records, which are not all read before the start, so "
                "their longest prompt is not known; set data.max_prompt_tokens, and longer ones are left out"
            )
        examples = _examples(config, prompts) if config.trainer.sft_warm_up_steps else []
    except DataError as error:
        raise ConfigError(str(error)) from error
    warnings = _warnings(config, prompts.renderer)
    return replace(prepared, prompts=checked.longest, examples=examples, stream=prompts, warnings=warnings)


def _warnings(config: RunConfig, renderer: Renderer) -> list[str]:
    """Warn of a checkpoint without a chat template, which may be lost; the built-in tokenizer never has one."""
    path = config.model.path
    if path is None or not renderer.plain_unasked or is_built_in(path):
        return []
    name = source_of(path)[0]
    lost = (
        f". By its name {Path(name).name} was trained on chats: a copy may lack chat_template.jinja, or chat_template "
        "in tokenizer_config.json"
        if _CHATS.search(Path(name).name)
        else ""
    )
    return [
        f"the tokenizer of model.path {name!r} has no chat template, so prompts go in as plain text; set "
        f"data.chat_template to off if that is meant{lost}"
    ]


def _opened(config: RunConfig, tools: Tools) -> DataPrompts:
    tokenizer = load_tokenizer(config.model.path, add_bos=config.rollout.add_bos)
    return DataPrompts(
        open_sets(config.data),
        Columns.of(config.data),
        Renderer(
            config.data, open_shots(config.data), tokenizer, tools=schemas(tools), raw=config.environment.is_agent
        ),
        Limits.of(config),
        seed=config.run.seed,
        epochs=config.task.epochs,
    )


def _examples(config: RunConfig, prompts: DataPrompts) -> list[tuple[str, str]]:
    """Return (prompt, answer) pairs of the first records of the order, as many as the SFT warm-up can use."""
    if config.data.answer_column is None:
        raise ConfigError(
            "trainer.sft_warm_up_steps asks for answers, and data.answer_column is null; set the steps to 0"
        )
    most = config.trainer.sft_warm_up_steps * config.trainer.sft_warm_up_batch
    first_epoch = DataPrompts(
        prompts.sets, prompts.columns, prompts.renderer, prompts.limits, seed=config.run.seed, epochs=1
    )
    return [(prompt.text, prompt.answer) for prompt in islice(first_epoch, most)]
