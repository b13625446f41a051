"""Where a run's prompts and rewards come from: a task, data sets, reward functions; checked before anything starts."""

from collections.abc import Sequence
from dataclasses import replace

from asyncrl.collectors.data.prompts import share_of
from asyncrl.collectors.rewards.function import RewardFunction
from asyncrl.collectors.rewards.load import load_rewards
from asyncrl.collectors.tasks import Task
from asyncrl.collectors.tasks.prepared import PreparedTask, prepare_environment, prepare_task
from asyncrl.collectors.tasks.prompts import list_evaluation_prompts
from asyncrl.configs import Loaded, RunConfig, load
from asyncrl.engine.errors import ConfigError
from asyncrl.filters import BaseRolloutFilter, build_chain
from asyncrl.filters.load import with_objects


def prepare_sources(
    loaded: Loaded, objects: Sequence[BaseRolloutFilter], *, only_evaluates: bool = False
) -> PreparedTask:
    """Build the task and the reward functions; ConfigError if one cannot work, or would have no effect.

    A run that `only_evaluates` needs no prompts to train on, and may score by other functions than it was trained with.
    """
    config = loaded.config
    given = config.data.given or (only_evaluates and config.evaluation.given)
    _check_data(loaded)
    _check_environment(loaded)
    rewards = _check_rewards(loaded, objects)
    if config.environment.name is not None:
        _check_no_task(loaded)
        return prepare_environment(
            config.environment.name,
            config.environment.options,
            warm_up=config.trainer.sft_warm_up_steps > 0,
            lists=not given,
        )
    if given and rewards:
        if not only_evaluates:
            _check_no_task(loaded)
        return PreparedTask(Task(), (), (), rewards=rewards)
    prepared = prepare_task(
        config.task.name,
        config.task.options,
        warm_up=config.trainer.sft_warm_up_steps > 0,
        lists=not given,
        rewards=rewards,
    )
    if config.reward.on_failure is not None and prepared.task.extras:
        raise ConfigError(
            f"reward.on_failure (from {loaded.sources['reward.on_failure']}) is {config.reward.on_failure:g}, and "
            f"task.name {config.task.name} attaches extras, which a failed score cannot bring; it must be null"
        )
    return prepared


def with_prompts(config: RunConfig, prepared: PreparedTask) -> PreparedTask:
    """Return what was prepared with the prompts of the configured data sets and of evaluations, if there are any.

    ConfigError if a reward function cannot score one of the prompts that are known.
    """
    if config.environment.name is not None:
        prepared = _in_environment(config, prepared)
    if config.data.given:
        from asyncrl.collectors.data.prepare import with_data

        prepared = with_data(config, prepared)
    for reward in prepared.rewards:
        for prompt in prepared.prompts:
            reward.check_prompt(prompt)
    return prepared if config.evaluation.every is None else with_evaluation(config, prepared)


def with_evaluation(config: RunConfig, prepared: PreparedTask) -> PreparedTask:
    """Return what was prepared with the prompts of evaluations.

    They come from evaluation data sets, the records that `data` holds out, or the task. ConfigError if none of these
    has any, or a reward function cannot score one of them.
    """
    data, asked = config.data, config.evaluation
    if asked.given or (data.given and data.holdout):
        from asyncrl.collectors.data.evaluation import evaluation_records

        try:
            prompts = evaluation_records(config, prepared.tools)
        except ConfigError as error:
            raise ConfigError(f"evaluation: {error}") from error
    elif data.given:
        raise ConfigError(
            "there is nothing to evaluate: evaluation.path is null, evaluation.sets empty and data.holdout 0; name a "
            "file of prompts that are not trained on (evaluation.path), or hold some out (data.holdout)"
        )
    else:
        # By a hash, so that a few of many are not those of one kind.
        name = config.environment.name
        option, named = ("task.name", config.task.name) if name is None else ("environment.name", name)
        listed = list_evaluation_prompts(prepared.task, named, option=option)
        prompts = sorted(listed, key=lambda one: share_of(one.id))[: asked.max_prompts]
        if name is not None:
            own = replace(prepared, prompts=prompts, examples=())
            prompts = [*_in_environment(config, own).prompts]
    for reward in prepared.rewards:
        for prompt in prompts:
            reward.check_prompt(prompt)
    return replace(prepared, evaluation=prompts)


def _in_environment(config: RunConfig, prepared: PreparedTask) -> PreparedTask:
    """Check that the tokenizer can write an environment's turns, and write its own prompts with it."""
    from asyncrl.engine.lifecycle.environments import check_environment, with_own_prompts
    from asyncrl.engine.lifecycle.parts import run_tokenizer, stop_ids

    tokenizer = run_tokenizer(config)
    check_environment(config, tokenizer, stop_ids=stop_ids(config, tokenizer), tools=prepared.tools)
    return with_own_prompts(config, tokenizer, prepared, tools=prepared.tools)


def _check_environment(loaded: Loaded) -> None:
    """Refuse options of an environment where none is named, and rewards beside one."""
    section, default = loaded.config.environment, load().config.environment
    for name in type(section).model_fields if section.name is None else ():
        value = getattr(section, name)
        if value != getattr(default, name):
            raise ConfigError(
                f"environment.{name} (from {loaded.sources[f'environment.{name}']}) is {value!r}, and environment.name "
                "is null, so it would change nothing; name an environment, or leave it out"
            )
    if section.name is not None and loaded.config.reward.functions:
        raise ConfigError(
            f"reward.functions (from {loaded.sources['reward.functions']}) has entries, and environment.name is "
            f"{section.name!r}, whose steps give the rewards; leave one of them out"
        )


def _check_no_task(loaded: Loaded) -> None:
    """Refuse a task to which an environment, or data sets and reward functions, leave nothing to do."""
    task, default = loaded.config.task, load().config.task
    instead = (
        "prompts come from data and rewards from reward.functions"
        if loaded.config.environment.name is None
        else f"prompts and rewards come from the environment {loaded.config.environment.name}"
    )
    for name in ("name", "options"):
        if getattr(task, name) != getattr(default, name):
            raise ConfigError(
                f"task.{name} (from {loaded.sources[f'task.{name}']}) is {getattr(task, name)!r}, and would change "
                f"nothing: {instead}. Leave it out, or one of them"
            )


def _check_data(loaded: Loaded) -> None:
    """Refuse options of data sets where none is named."""
    data, evaluation = loaded.config.data, loaded.config.evaluation
    if data.given or evaluation.given:
        return
    default = load().config.data
    for name in type(data).model_fields:
        value = getattr(data, name)
        if value != getattr(default, name):
            raise ConfigError(
                f"data.{name} (from {loaded.sources[f'data.{name}']}) is {value!r}, and data.path is null and "
                "data.sets empty, so it would change nothing; name a file with --data FILE (data.path)"
            )


def _check_rewards(loaded: Loaded, objects: Sequence[BaseRolloutFilter]) -> Sequence[RewardFunction]:
    """Build the reward functions; ConfigError if one cannot work, or its part has the name of a tagger's tag."""
    config = loaded.config
    try:
        rewards = load_rewards(config.reward.functions)
    except ConfigError as error:
        raise ConfigError(f"reward.functions (from {loaded.sources['reward.functions']}): {error}") from error
    chain = build_chain(with_objects(config.filters, objects), min_live=config.rollout.min_live)
    for reward in rewards:
        if reward.part in chain.taggers:
            raise ConfigError(
                f"reward {reward.name} has the part {reward.part!r}, and a filter's tagger gives a tag of that name; "
                "give it another `part`"
            )
    return rewards
