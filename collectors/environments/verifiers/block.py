"""verifiers' own configuration, its `[env]` block, made from an environment's options."""

import sys
from collections.abc import Mapping
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.select import SelectConfig
from verifiers.v1.utils.loaders import default_harness_id, load_environment, resolve_env_config

from asyncrl.collectors.environments.verifiers import chat

CHAT = "asyncrl_chat"
"""The harness of the role in training, unless another one is named."""


def environment(taskset: str | Mapping[str, Any], env: Mapping[str, Any]) -> tuple[Any, str]:
    """Return verifiers' environment, and the role in training; ValueError if there is none, or more than one."""
    sys.modules[CHAT] = chat  # verifiers finds a harness as a module by its name.
    block: dict[str, Any] = {**env, "taskset": {"id": taskset} if isinstance(taskset, str) else dict(taskset)}
    config = resolve_env_config(dict(block))
    roles = agent_config_fields(config)
    trained = [name for name, role in roles.items() if role.client is None]
    if len(trained) != 1:
        raise ValueError(
            f"the roles {', '.join(roles)} have no client of their own but {len(trained)}: {', '.join(trained)}; one "
            "must be the model in training, and every other must have its `client` and `model`"
        )
    (seat,) = trained
    _check(config, roles[seat], seat)
    for name, role in roles.items():
        given = dict(block.get(name) or {})
        if isinstance(role.runtime, vf.PrimeConfig) and "runtime" not in given:
            given["runtime"] = {"type": "subprocess"}  # verifiers' default is a machine of its makers'.
        bundled = default_harness_id(config.taskset.id) != "bash"
        if name == seat and role.harness is None and not bundled:
            given["harness"] = {"id": CHAT}
        block[name] = given
    return load_environment(resolve_env_config(block)), seat


def context(base_url: str, api_key_var: str) -> Any:
    """Return how a rollout reaches the model: the same for all, so that verifiers makes one client."""
    return vf.ModelContext("policy", vf.EvalClientConfig(base_url=base_url, api_key_var=api_key_var))


def tasks(taskset: Any, select: Mapping[str, Any], option: str) -> dict[int, Any]:
    """Return the chosen tasks by their number in the taskset; ValueError if they have no end."""
    view = taskset.select(SelectConfig.model_validate(dict(select)))
    if not view.bounded:
        raise ValueError(
            f"the taskset has no end; environment.options.{option} must have a limit, as in {{limit: 1000}}"
        )
    return {task.data.idx: task for task in view}


def _check(config: Any, role: Any, seat: str) -> None:
    """Refuse what would make two samples of one, or other tokens than the run's."""
    for name, retries in (("retries", config.retries), (f"{seat}.retries", role.retries)):
        if retries.max_retries or retries.rules:
            raise ValueError(f"{name} is set; a rollout is one sample and is not played again, so leave it out")
    if role.sampling is not None:
        raise ValueError(
            f"{seat}.sampling is set; rollout.temperature and its siblings say how the model's tokens are drawn"
        )
