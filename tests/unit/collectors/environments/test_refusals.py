"""Environments that cannot work are refused before a run, by option."""

from collections.abc import Awaitable
from typing import Any

import pytest

from asyncrl.collectors.environments import Environment, Step, Tool, Turn
from asyncrl.collectors.environments.load import load_environment
from asyncrl.collectors.scoring import AsyncScorer
from asyncrl.configs import Override, load, load_config
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.lifecycle.environments import check_environment
from asyncrl.engine.lifecycle.scorers import ray_scorer
from asyncrl.engine.model.tokenizer import CharTokenizer
from asyncrl.engine.running.checks import check_runnable


class Fine(Environment):
    async def step(self, state: Any, turn: Turn) -> Step:
        return Step(done=True)


class Blocks(Environment):
    def step(self, state: Any, turn: Turn) -> Step:  # type: ignore[override]
        return Step(done=True)


class NoStep(Environment):
    pass


async def call(state: Any) -> str:
    return ""


def plain(state: Any) -> Awaitable[str]:
    return call(state)


def refusal(**values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_runnable(
            load("default", [Override(name.replace("__", "."), value, "here") for name, value in values.items()])
        )
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        (
            "gues",
            {},
            r"environment.name is 'gues'; did you mean guess\?; it must be one of agent, calculator, guess, reas",
        ),
        ("nowhere:Env", {}, "environment.name nowhere:Env: cannot import nowhere"),
        (f"{__name__}:call", {}, "not a subclass of Environment"),
        (f"{__name__}:Blocks", {}, r"step must be async \(async def step\)"),
        (f"{__name__}:NoStep", {}, "has no step, which says what a turn leads to"),
        ("guess", {"numbers": 1}, "environment.options {'numbers': 1} do not fit guess: numbers is 1"),
        ("guess", {"tries": 1}, "environment.options of guess has no parameter 'tries'; it has numbers, games, seed"),
        ("guess", {"number": 1}, r"no parameter 'number'; did you mean numbers\?"),
        ("guess", {"numbers": "1"}, "environment.options of guess: numbers is '1'; it must be int"),
        ("agent", {}, r"environment.options of agent needs function \(docs/environments.md\)"),
    ],
)
def test_a_name_or_options_that_do_not_fit_are_refused(name: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_environment(name, options)


@pytest.mark.parametrize(
    ("tools", "why"),
    [
        ([Tool("a", "", {"type": "object"}, call)] * 2, "two tools are called 'a'"),
        ([Tool("a", "", {"type": "string"}, call)], "parameters of tool 'a' are of type 'string'"),
        ([Tool("a", "", {"type": "object"}, plain)], "the call of tool 'a' must be async"),
        (["a"], "tools has 'a'; each must be a Tool"),
    ],
)
def test_tools_that_cannot_be_called_are_refused(monkeypatch: Any, tools: Any, why: str) -> None:
    monkeypatch.setattr(Fine, "tools", tools)
    with pytest.raises(ConfigError, match=why):
        load_environment(f"{__name__}:Fine", {})


def test_tools_without_a_chat_template_are_refused() -> None:
    why = refusal(environment__name="calculator")
    assert why.startswith("an environment's tools need a chat template, and the built-in small model has none; name a ")


def test_a_template_without_tools_and_a_tokenizer_without_their_marks_are_refused(chat_ml: Any) -> None:
    class NoTools(type(chat_ml)):  # type: ignore[misc]
        def chat(self, messages: Any, *, tools: Any = ()) -> str:
            return str(super().chat(messages))

    class NoMarks(type(chat_ml)):  # type: ignore[misc]
        def decode(self, ids: list[int]) -> str:
            return str(super().decode(ids)).replace("<tool_call>", "")

    config = load_config("default", {"environment.name": "calculator"})
    tools = load_environment("calculator", {}).tools
    with pytest.raises(ConfigError, match="has the tool 'calculate', and the chat template of None writes no tools"):
        check_environment(config, NoTools(), stop_ids=[2], tools=tools)
    with pytest.raises(ConfigError, match="leaves <tool_call> out of texts; calls could not be read"):
        check_environment(config, NoMarks(), stop_ids=[2], tools=tools)
    check_environment(config, chat_ml, stop_ids=[2], tools=tools)
    check_environment(config, CharTokenizer(), stop_ids=[1], tools=())


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"environment__max_turns": 0}, "environment.max_turns"),
        ({"environment__max_turns": 3}, "environment.name is null, so it would change nothing"),
        (
            {"environment__name": "guess", "task__name": "reverse"},
            "prompts and rewards come from the environment guess",
        ),
        (
            {"environment__name": "guess", "reward__functions": [{"name": "exact_match"}]},
            "environment.name is 'guess', whose steps give the rewards",
        ),
        ({"environment__name": "guess", "collector__engine": "batch"}, "environment.name (from"),
        ({"environment__name": "guess", "rollout__oversample": 1}, "so oversample must be 0"),
        (
            {"environment__name": "guess", "environment__max_tokens": 5000},
            "more than environment.max_tokens 5000",
        ),
        (
            {"environment__name": "guess", "collector__slot_tokens": 100},
            "the longest prompt and environment.max_tokens come to 1026",
        ),
        ({"environment__name": "guess", "environment__on_tool_error": "ignore"}, "environment.on_tool_error"),
    ],
)
def test_options_that_contradict_an_environment_are_refused(values: dict[str, Any], why: str) -> None:
    assert why in refusal(**values)


def test_on_ray_an_environment_needs_no_process_that_scores() -> None:
    scorer = ray_scorer(load_config("default", {"environment.name": "guess"}), taggers={})
    assert isinstance(scorer, AsyncScorer)
