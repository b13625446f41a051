"""What must hold between the options of models, data, environments and evaluations.

Each rule is a ValueError that names the options, their values and their range.
"""

from typing import TYPE_CHECKING

from asyncrl.configs.rewards import reward_entries
from asyncrl.configs.sections.fields import MIN_TEMPERATURE

if TYPE_CHECKING:
    from asyncrl.configs.schema import RunConfig


def heads_divide(config: "RunConfig") -> None:
    """A model without a folder has heads of an even width."""
    model = config.model
    if model.path is None and model.hidden_size % model.heads:
        raise ValueError(f"model.heads is {model.heads}; it must divide model.hidden_size {model.hidden_size}")
    if model.path is None and model.hidden_size // model.heads % 2:
        raise ValueError(
            f"model.heads is {model.heads} and model.hidden_size {model.hidden_size}; a head has "
            f"{model.hidden_size // model.heads} dimensions, and rotary positions need an even number of them"
        )


def data_agree(config: "RunConfig") -> None:
    """Data come from one place, and some prompt is within the limits."""
    data = config.data
    if data.path is not None and data.sets:
        raise ValueError(f"data.path is {data.path!r} and data.sets has {len(data.sets)} entries; give one of them")
    if data.split is not None and data.path is None:
        raise ValueError(f"data.split is {data.split!r} and data.path null; an entry of data.sets has its own split")
    if len({entry.weight is None for entry in data.sets}) > 1:
        raise ValueError("data.sets: some entries have a weight and some have none; give all of them one, or none")
    if "{prompt}" not in data.prompt_format:
        raise ValueError(f"data.prompt_format is {data.prompt_format!r}; it must hold {{prompt}}")
    if data.max_prompt_tokens is not None and data.min_prompt_tokens > data.max_prompt_tokens:
        raise ValueError(
            f"data.min_prompt_tokens is {data.min_prompt_tokens} and data.max_prompt_tokens "
            f"{data.max_prompt_tokens}; no prompt is within both"
        )


def environment_agrees(config: "RunConfig") -> None:
    """An environment plays its own samples."""
    if config.environment.name is not None and config.rollout.oversample:
        raise ValueError(
            f"environment.name is {config.environment.name} and rollout.oversample {config.rollout.oversample}; the "
            "samples of an environment are played to their end, so oversample must be 0"
        )
    data, evaluation = config.data, config.evaluation
    if config.environment.name == "verifiers":
        for name, path, sets in (("data", data.path, data.sets), ("evaluation", evaluation.path, evaluation.sets)):
            if path is not None or sets:
                raise ValueError(
                    f"environment.name is verifiers and {name}.path {path!r}, with {len(sets)} {name}.sets; its "
                    "taskset has the prompts, so path must be null and sets empty"
                )


def evaluation_agrees(config: "RunConfig") -> None:
    """Evaluations have prompts, samples that differ, and room."""
    evaluation, decode_samples = config.evaluation, config.collector.decode_samples
    if evaluation.every is None and not (evaluation.at_start and evaluation.at_end):
        raise ValueError(
            f"evaluation.at_start is {evaluation.at_start}, evaluation.at_end {evaluation.at_end} and "
            "evaluation.every null, by which a run has no evaluation; set every to a number of steps"
        )
    if evaluation.path is not None and evaluation.sets:
        raise ValueError(
            f"evaluation.path is {evaluation.path!r} and evaluation.sets has {len(evaluation.sets)} entries; "
            "give one of them"
        )
    if evaluation.split is not None and evaluation.path is None:
        raise ValueError(
            f"evaluation.split is {evaluation.split!r} and evaluation.path null; an entry of evaluation.sets has "
            "its own split"
        )
    if any(entry.weight is not None for entry in evaluation.sets):
        raise ValueError("evaluation.sets: an entry has a weight; every prompt is evaluated once, leave it out")
    if 0 < evaluation.temperature < MIN_TEMPERATURE:
        raise ValueError(
            f"evaluation.temperature is {evaluation.temperature:g}; it must be 0 or at least {MIN_TEMPERATURE:g}"
        )
    if evaluation.samples > 1 and not evaluation.temperature:
        raise ValueError(
            f"evaluation.samples is {evaluation.samples} and evaluation.temperature 0, by which all of them are "
            "equal; samples must be 1, or the temperature above 0"
        )
    # The groups of an evaluation are taken out again one by one.
    capacity, needed = config.data_plane.capacity_rows, config.run_ahead_groups + 1
    if evaluation.every is not None and capacity is not None and capacity < needed:
        raise ValueError(
            f"data_plane.capacity_rows is {capacity}; run-ahead needs {needed - 1} and evaluation 1 more, "
            f"so it must be at least {needed}"
        )
    if evaluation.samples > decode_samples:
        raise ValueError(
            f"evaluation.samples is {evaluation.samples} and collector.decode_samples {decode_samples}; the "
            "samples of a prompt decode together, so decode_samples must be at least samples"
        )


def saves_agree(config: "RunConfig") -> None:
    """Something is saved, or `save_every` is null."""
    run = config.run
    if run.save_every is not None and not run.save_model:
        raise ValueError(
            f"run.save_every is {run.save_every} and run.save_model false, by which nothing is saved; "
            "save_every must be null, or save_model true"
        )


def names_are_given(config: "RunConfig") -> None:
    """Filters and rewards are named."""
    for entry in config.filters:
        if not isinstance(entry.get("name"), str):
            raise ValueError(f"filters: each entry needs a name, a string; got {entry}")
    reward_entries(config.reward.functions)
