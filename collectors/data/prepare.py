"""A run's data before anything starts: opened, looked at, and made into the stream that the run draws from."""

from dataclasses import replace
from itertools import islice

from asyncrl.collectors.data.check import CHECKED_RECORDS, check_prompts
from asyncrl.collectors.data.columns import Columns
from asyncrl.collectors.data.open import open_sets, open_shots
from asyncrl.collectors.data.prompts import DataPrompts, Limits
from asyncrl.collectors.data.renderer import Renderer
from asyncrl.collectors.environments.tools import Tools, schemas
from asyncrl.collectors.tasks.prepared import PreparedTask
from asyncrl.configs import RunConfig
from asyncrl.engine.errors import ConfigError, DataError
from asyncrl.engine.model.tokenizer import load_tokenizer


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
    return replace(prepared, prompts=checked.longest, examples=examples, stream=prompts)


def _opened(config: RunConfig, tools: Tools) -> DataPrompts:
    tokenizer = load_tokenizer(config.model.path, add_bos=config.rollout.add_bos)
    return DataPrompts(
        open_sets(config.data),
        Columns.of(config.data),
        Renderer(config.data, open_shots(config.data), tokenizer, tools=schemas(tools)),
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
