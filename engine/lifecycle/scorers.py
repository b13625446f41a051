"""What scores in a run: its task, or its reward functions, in the places that fit its runtime."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from asyncrl.collectors.outcome import Rules
from asyncrl.collectors.question import Judge
from asyncrl.collectors.rewards.function import Kind
from asyncrl.collectors.rewards.load import build_judge, reward_kinds
from asyncrl.collectors.rewards.scorer import RewardScorer
from asyncrl.collectors.rewards.total import reward_sum
from asyncrl.collectors.score_process import ProcessScorer
from asyncrl.collectors.scoring import AsyncScorer, InPlaceScorer, Place, Scorer, ThreadScorer
from asyncrl.collectors.tasks import Task, load_task
from asyncrl.collectors.tasks.load import task_class
from asyncrl.collectors.tasks.prepared import PreparedTask
from asyncrl.configs import RunConfig
from asyncrl.engine.aio.call_in import CallIn
from asyncrl.filters.taggers import Tagger


def local_scorer(
    config: RunConfig, prepared: PreparedTask, *, taggers: Mapping[str, Tagger], call_in: CallIn
) -> Scorer:
    """Return what scores while the event loop waits, in one order for one seed; by `call_in` if it is not async."""
    rules, task, functions = _rules(config, taggers), prepared.task, prepared.rewards

    def place(judge: Judge, *, asynchronous: bool) -> Place:
        return AsyncScorer(judge, rules) if asynchronous else InPlaceScorer(judge, rules, call_in=call_in)

    if not functions:
        return place(task, asynchronous=inspect.iscoroutinefunction(task.score))
    return _over_places(
        rules,
        [function.kind for function in functions],
        lambda asynchronous: place(reward_sum(functions, asynchronous=asynchronous), asynchronous=asynchronous),
    )


def ray_scorer(config: RunConfig, *, taggers: Mapping[str, Tagger]) -> Scorer:
    """Return what scores beside a collector's event loop; processes start at once, and build what scores in them."""
    rules, task, entries = _rules(config, taggers), config.task, config.reward.functions
    if config.environment.name is not None:
        return AsyncScorer(Task(), rules)  # Never asked: the samples of an environment bring their rewards.

    def place(build: Callable[[], Judge], *, asynchronous: bool) -> Place:
        if asynchronous:
            return AsyncScorer(build(), rules)
        processes, start_timeout_s = config.collector.score_processes, config.supervision.start_timeout_s
        if not processes:
            return ThreadScorer(build(), rules)
        return ProcessScorer(build, rules, processes=processes, start_timeout_s=start_timeout_s)

    if not entries:
        asynchronous = inspect.iscoroutinefunction(task_class(task.name).score)
        return place(partial(load_task, task.name, task.options), asynchronous=asynchronous)
    return _over_places(
        rules,
        reward_kinds(entries),
        lambda asynchronous: place(partial(build_judge, entries, asynchronous=asynchronous), asynchronous=asynchronous),
    )


def _rules(config: RunConfig, taggers: Mapping[str, Tagger]) -> Rules:
    timeout_s, taken = config.collector.score_timeout_s, frozenset(taggers)
    names = ", ".join(entry["name"] for entry in config.reward.functions)
    return Rules(names, timeout_s, taken, "rewards") if names else Rules(config.task.name, timeout_s, taken)


def _over_places(rules: Rules, kinds: Sequence[Kind], make: Callable[[bool], Place]) -> RewardScorer:
    """Return a scorer over one place for functions that are async and one for the others, as far as there are any."""
    places = {asynchronous: make(asynchronous) for asynchronous in sorted({kind.asynchronous for kind in kinds})}

    def asked(*, of_group: bool) -> list[Place]:
        chosen = {kind.asynchronous for kind in kinds if kind.of_group == of_group}
        return [place for asynchronous, place in places.items() if asynchronous in chosen]

    return RewardScorer(rules, alone=asked(of_group=False), of_group=asked(of_group=True))
