"""Tasks: the two built-in ones, and what is refused before a run starts."""

import sys
from collections.abc import Sequence
from types import ModuleType

import pytest

from asyncrl.collectors.tasks import Reward, Task, load_task
from asyncrl.collectors.tasks.prepared import prepare_task
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.records import Prompt


def test_long_tail_rewards_the_first_character_alone() -> None:
    task = load_task("long_tail", {})
    three = next(prompt for prompt in task.prompts() if prompt.answer == "3")
    assert [task.score(three, text) for text in ("5", "58888888", "4", "")] == [1.0, 1.0, 0.0, 0.0]


class Empty(Task):
    def prompts(self) -> Sequence[Prompt]:
        return []

    def score(self, prompt: Prompt, response: str) -> float:
        return 0.0


class Wordless(Empty):
    def prompts(self) -> Sequence[Prompt]:
        return [Prompt(3, "a"), Prompt(4, "")]


class Twice(Empty):
    def __init__(self, times: int = 2) -> None:
        self._times = times

    def prompts(self) -> Sequence[Prompt]:
        return [Prompt(7, "a")] * self._times


class Odd(Twice):
    def __init__(self, extras: object) -> None:
        super().__init__(1)
        self.extras = extras  # type: ignore[assignment]


class NoTask:
    pass


@pytest.fixture(autouse=True)
def _module() -> None:
    module = ModuleType("tasks_under_test")
    module.__dict__.update(Empty=Empty, Wordless=Wordless, Twice=Twice, Odd=Odd, NoTask=NoTask)
    sys.modules["tasks_under_test"] = module


def test_echo_asks_for_the_digit() -> None:
    prompts = load_task("echo", {}).prompts()
    assert [(p.id, p.text, p.answer, p.dataset) for p in prompts] == [(i, f"{i}>", str(i), "echo") for i in range(10)]


def test_reverse_asks_for_three_digits_backwards() -> None:
    prompts = load_task("reverse", {}).prompts()
    assert len(prompts) == 1000
    assert all(p.text == f"{p.id:03d}>" and p.answer == f"{p.id:03d}"[::-1] for p in prompts)
    assert {p.dataset for p in prompts} == {"reverse"}


@pytest.mark.parametrize(("name", "right"), [("echo", "4"), ("reverse", "400")])
def test_only_the_exact_answer_is_rewarded(name: str, right: str) -> None:
    task = load_task(name, {})
    prompt = task.prompts()[4]
    scores = [task.score(prompt, response) for response in (right, f"{right}{right}", "", right[1:] + "9", f"_{right}")]
    assert scores == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_examples_for_the_warm_up_are_prompts_with_their_answers() -> None:
    assert load_task("reverse", {}).examples()[123] == ("123>", "321")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ecko", {}, "did you mean echo"),
        ("nonsense", {}, "echo, reverse"),
        ("no_such_module_here:X", {}, "cannot import no_such_module_here"),
        ("tasks_under_test:Emty", {}, "did you mean Empty"),
        ("tasks_under_test:", {}, "module:Class"),
        ("tasks_under_test:NoTask", {}, "not a subclass of Task"),
        ("tasks_under_test:Empty", {}, "no prompts"),
        ("tasks_under_test:Wordless", {}, "prompt 4 has no text"),
        ("tasks_under_test:Twice", {}, "ids repeat: prompts number 0 and 1 both have 7"),
        ("tasks_under_test:Twice", {"time": 1}, r"task.options \{'time': 1\}"),
        ("tasks_under_test:Odd", {"extras": "image"}, "extras are 'image'; they must be a list of names"),
        ("tasks_under_test:Odd", {"extras": ["image", "image"]}, "each once"),
        ("tasks_under_test:Odd", {"extras": ["logprobs"]}, "extra cannot be called 'logprobs'"),
        ("tasks_under_test:Odd", {"extras": ["attention_mask"]}, "extra cannot be called 'attention_mask'"),
        ("tasks_under_test:Odd", {"extras": ["pixel values"]}, "must be an identifier"),
    ],
)
def test_a_task_that_cannot_work_is_refused(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare_task(name, options, warm_up=False)


def test_options_reach_the_task() -> None:
    assert len(load_task("tasks_under_test:Twice", {"times": 1}).prompts()) == 1


@pytest.mark.parametrize("name", ["reward", "version", "status", "group", "response_tokens"])
def test_a_part_of_a_reward_cannot_take_the_name_of_a_tag(name: str) -> None:
    """It would replace what the front end and the planner read."""
    with pytest.raises(ValueError, match=name):
        Reward(1.0, {name: 0.5})


def test_extras_of_a_task_are_the_names_that_it_declares() -> None:
    assert load_task("tasks_under_test:Odd", {"extras": ["pixel_values"]}).extras == ["pixel_values"]
    assert load_task("echo", {}).extras == ()
