"""The environment `verifiers`: tasks, rollouts and rewards of an environment of the package verifiers (its `v1`).

rollout ─▶ verifiers' interception ─▶ our address (tokens, log-probabilities, versions) ─▶ engine

Invariant: verifiers sees texts, and the trainer the tokens that were sampled; of a rollout only its rewards are taken.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import anyio.to_thread

from asyncrl.collectors.environments.agents.solver import Solver
from asyncrl.collectors.tasks.base import Reward
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.records import Prompt

_KEY = "task"
_NO_KEY = "ASYNCRL_HAS_NO_KEY"
"""A variable that nobody sets: the sample's key is the rollout's id, which verifiers sends along."""
_END_S = 30.0
"""How long a rollout that is given up may take to tidy up; what it holds longer is left to it."""


class RolloutFailed(RuntimeError):
    """A rollout of verifiers did not come to a reward."""


class Verifiers(Solver):
    """`taskset` is the name of an installed taskset, or a map of its `id` and options; `env` is the rest of verifiers'
    `[env]` block, such as `agent: {harness: {id: bash}}`. The role without a `client` of its own is the model in
    training.

    `select` chooses tasks as verifiers' `--select` does, `evaluate` those of evaluations, which training then leaves
    out. Roles run on this host, and the one in training as a chat with tools in the collector's process, unless `env`
    or the taskset says otherwise.
    """

    def __init__(
        self,
        taskset: str | Mapping[str, Any],
        select: Mapping[str, Any] | None = None,
        evaluate: Mapping[str, Any] | None = None,
        **env: Any,
    ) -> None:
        try:
            from asyncrl.collectors.environments.verifiers import block
        except ImportError as error:
            raise ConfigError(
                f"environment.name verifiers needs the package verifiers, which cannot be imported ({error}): "
                "pip install 'asyncrl[verifiers]'"
            ) from error
        self._select = dict(select or {})
        self._evaluate = None if evaluate is None else dict(evaluate)
        self._env, self._seat = block.environment(taskset, env)
        self._name = self._env.config.taskset.id
        self._tasks: dict[int, Any] | None = None
        self._held_out: frozenset[int] = frozenset()
        self._serves = anyio.Event()

    def prompts(self) -> Sequence[Prompt]:
        """Return a prompt per task: its own text, which the rollout may put other messages around."""
        return [self._prompt(i, task) for i, task in self._loaded().items() if i not in self._held_out]

    def evaluation_prompts(self) -> Sequence[Prompt]:
        if self._evaluate is None:
            raise ConfigError("environment.options.evaluate is missing; it must choose the tasks of evaluations")
        return [self._prompt(i, task) for i, task in self._loaded().items() if i in self._held_out]

    def examples(self) -> Sequence[tuple[str, str]]:
        raise ConfigError("tasks of verifiers have no answers to learn from")

    async def serve(self) -> None:
        """Load the tasks, and hold what verifiers serves its rollouts with."""
        await anyio.to_thread.run_sync(self._loaded)
        async with self._env.serving():
            self._serves.set()
            await anyio.sleep_forever()

    async def solve(self, prompt: Prompt, base_url: str, api_key: str) -> Reward:
        """Run one rollout; RolloutFailed with verifiers' own error if it did not end well."""
        from asyncrl.collectors.environments.verifiers import block

        await self._serves.wait()
        run = self._env.run_episode(self._task(prompt), block.context(base_url, _NO_KEY), on_trace=self._named(api_key))
        return self._reward(await _to_its_end(run))

    def _loaded(self) -> dict[int, Any]:
        if self._tasks is None:
            from asyncrl.collectors.environments.verifiers import block

            held_out = {} if self._evaluate is None else block.tasks(self._env.taskset, self._evaluate, "evaluate")
            self._held_out = frozenset(held_out)
            self._tasks = {**block.tasks(self._env.taskset, self._select, "select"), **held_out}
        return self._tasks

    def _prompt(self, number: int, task: Any) -> Prompt:
        # A conversation that its user opens has no text; the number stands for it in the log.
        return Prompt(number, task.data.prompt_text or str(number), dataset=self._name, fields={_KEY: task.key})

    def _task(self, prompt: Prompt) -> Any:
        task = self._loaded().get(int(prompt.id))
        if task is None or task.key != prompt.fields.get(_KEY):
            raise RolloutFailed(
                f"task {prompt.id} of {self._name} is another one here than when the run began; a taskset must load "
                "the same tasks every time"
            )
        return task

    def _named(self, api_key: str) -> Any:
        def minted(trace: Any) -> None:
            if trace.agent.name == self._seat:
                trace.id = api_key

        return minted

    def _reward(self, episode: Any) -> Reward:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            what = f"{errors[-1].type}: {errors[-1].message}" if errors else "verifiers gives no reason"
            raise RolloutFailed(f"the rollout of a task of {self._name} failed: {what}")
        (trace,) = [trace for trace in episode.traces if trace.agent.name == self._seat]
        parts = {name: value for name, value in trace.metrics.items() if value is not None}
        parts |= {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        return Reward(trace.reward, parts)


async def _to_its_end(run: Any) -> Any:
    """Await a rollout in a task of its own, which is cancelled once: verifiers' ends do not survive being cancelled
    again and again, as a task in a scope of anyio is."""
    task = asyncio.ensure_future(run)
    try:
        return await asyncio.shield(task)
    finally:
        if not task.done():
            task.cancel()
            with anyio.move_on_after(_END_S, shield=True):
                await asyncio.wait([task])
