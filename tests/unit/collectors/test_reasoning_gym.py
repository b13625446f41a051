"""Questions of reasoning-gym as prompts, with a fake of the package."""

import sys
from types import ModuleType
from typing import Any

import anyio
import pytest

from asyncrl.collectors.environments import Step, Turn, load_environment
from asyncrl.collectors.tasks import load_task
from asyncrl.collectors.tasks.prepared import prepare_task
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.records import Prompt


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A package whose data set counts up to `most` and begins anew; returns what it was asked for."""
    calls: list[dict[str, Any]] = []
    package = ModuleType("reasoning_gym")

    def create_dataset(name: str, *, size: int, seed: int, most: int = 1000) -> list[dict[str, Any]]:
        calls.append({"name": name, "size": size, "seed": seed, "most": most})
        return [{"question": f"{name} {i % most}?", "answer": f"{i % most}", "metadata": {}} for i in range(size)]

    package.__dict__["create_dataset"] = create_dataset
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    return calls


def test_answered_questions_of_the_same_data_set_stand_in_front(asked: list[dict[str, Any]]) -> None:
    options = {"datasets": {"add": {"most": 50}, "count": None}, "size": 2, "few_shot": 2, "seed": 7}
    prompts = prepare_task("reasoning_gym", options, warm_up=False).prompts
    assert [prompt.id for prompt in prompts] == ["add:0", "add:1", "count:0", "count:1"]
    assert prompts[1] == Prompt(
        id="add:1",
        text="Question: add 0?\nAnswer: 0\n\nQuestion: add 1?\nAnswer: 1\n\nQuestion: add 3?\nAnswer:",
        answer="3",
        dataset="add",
    )
    assert asked == [
        {"name": "add", "size": 4, "seed": 7, "most": 50},
        {"name": "count", "size": 4, "seed": 7, "most": 1000},
    ]


def test_a_question_that_stands_in_front_is_not_asked(asked: list[dict[str, Any]]) -> None:
    prompts = load_task("reasoning_gym", {"datasets": {"add": {"most": 3}}, "size": 5, "few_shot": 2}).prompts()
    assert [prompt.answer for prompt in prompts] == ["2", "2"]


def test_without_examples_the_prompt_is_the_question(asked: list[dict[str, Any]]) -> None:
    prompts = load_task("reasoning_gym", {"datasets": {"add": {}}, "size": 1, "few_shot": 0}).prompts()
    assert [(prompt.text, prompt.answer) for prompt in prompts] == [("add 0?", "0")]


def test_questions_held_out_are_evaluated_once_and_never_trained_on(asked: list[dict[str, Any]]) -> None:
    """Fifty questions come four times; each is on one side."""
    task = load_task("reasoning_gym", {"datasets": {"add": {"most": 50}}, "size": 200, "few_shot": 2, "holdout": 0.3})
    trained, evaluated = ([prompt.answer for prompt in found] for found in (task.prompts(), task.evaluation_prompts()))
    assert not set(trained) & set(evaluated)
    assert {*trained, *evaluated} == {str(i) for i in range(2, 50)}
    assert 5 < len(evaluated) == len(set(evaluated)) < 25
    with pytest.raises(ConfigError, match=r"set holdout in task\.options"):
        load_task("reasoning_gym", {"datasets": {"add": {}}}).evaluation_prompts()


def test_only_the_exact_answer_is_right() -> None:
    task = load_task("reasoning_gym", {"datasets": {"add": {}}})
    said = {" 7": 1.0, "7\n": 1.0, "7.": 0.0, "the answer is 7": 0.0, "": 0.0}
    assert {text: task.score(Prompt(1, "3 + 4", "7"), text) for text in said} == said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"datasets": {}}, "datasets is {}; it must have"),
        ({"datasets": ["add"]}, "it must have the parameters"),
        ({"datasets": {"add": {}}, "size": 0}, "size is 0 and few_shot 4"),
        ({"datasets": {"add": {}}, "few_shot": -1}, "few_shot -1"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_task("reasoning_gym", options)
    assert words in str(refused.value)


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"reasoning-gym, which cannot be imported .*scripts/install smollm2"):
        prepare_task("reasoning_gym", {"datasets": {"add": {}}}, warm_up=False)


def test_as_an_environment_a_wrong_answer_may_be_mended(asked: list[dict[str, Any]]) -> None:
    environment = load_environment("reasoning_gym", {"datasets": {"add": None}, "size": 2, "few_shot": 0})
    prompt = environment.prompts()[1]

    async def play() -> tuple[Step, Step]:
        state = await environment.reset(prompt, 0)
        return await environment.step(state, Turn("7\n", 0, True)), await environment.step(state, Turn(" 1\n", 1, True))

    wrong, right = anyio.run(play)
    assert (wrong.reply, wrong.done, wrong.reward) == ("Wrong. Try again.\nAnswer:", False, 0.0)
    assert (right.done, right.reward) == (True, 0.5)
