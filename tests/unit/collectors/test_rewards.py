"""Reward functions: what their signatures say, how they add up, what fails whom, and what is refused at the start."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.collectors.outcome import Outcome, Rules, SampleFailure
from asyncrl.collectors.rewards.load import build_judge, load_rewards, reward_kinds
from asyncrl.collectors.rewards.scorer import RewardScorer
from asyncrl.collectors.scoring import AsyncScorer, InPlaceScorer
from asyncrl.collectors.tasks import Response, Reward
from asyncrl.collectors.tasks.prepared import prepare_task
from asyncrl.configs import load_config
from asyncrl.engine.aio.virtual_time import run_virtual
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.records import Prompt

PROMPT = Prompt(3, "2+2=", "4", fields={"level": 2})
RULES = Rules("sums", timeout_s=20.0)

MINE = """
import sys, asyncio
from asyncrl.collectors.tasks import Reward, Task
from asyncrl.engine.records import Prompt

def level(prompt, response, scale=1):
    return scale * prompt.fields["level"]

def tokens(prompt, response):
    return Reward(response.tokens, {"done": response.finished})

async def judge(prompt, response):
    await asyncio.sleep(1)
    return len(response)

def rank(prompt, responses, rewards):
    if "odd" in responses:
        return [1.0]
    rewards.sort(key=lambda reward: -1 if reward is None else reward)
    return [len(rewards) - i for i, _ in enumerate(responses)]

class Counts:
    def __init__(self, letter: str):
        self.letter = letter
    def __call__(self, prompt, response):
        if response == "exit":
            sys.exit()
        return float(response.count(self.letter))

def named(*, prompt, response=None):
    return 0.0

def stream(prompt, response):
    yield 0.0

class Mute:
    pass

def trl(prompts, completions):
    return 0.0

class Greedy(Mute):
    def __call__(self, prompt, response, answer):
        return 0.0

def answers(prompt, response, answer):
    return 0.0

number = 3

class Sums(Task):
    def prompts(self):
        return [Prompt(0, "1+1=", "2")]

class Given(Sums):
    def score(self, prompt, response):
        return 1.0
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's folder, in which a file is found by its name alone."""
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)


def mine(function: str, **more: Any) -> dict[str, Any]:
    return {"name": f"mine.py:{function}", **more}


def scored(entries: Sequence[dict[str, Any]], *responses: str) -> list[Outcome]:
    """Score in the event loop, as `runtime: local` does."""
    kinds = reward_kinds(entries)
    blocking = InPlaceScorer(build_judge(entries, asynchronous=False), RULES)
    waiting = AsyncScorer(build_judge(entries, asynchronous=True), RULES)
    alone = [
        place for place, is_async in ((blocking, False), (waiting, True)) if is_async in {k.asynchronous for k in kinds}
    ]
    of_group = [blocking] if any(kind.of_group for kind in kinds) else []
    scorer = RewardScorer(RULES, alone=alone, of_group=of_group)
    return run_virtual(partial(scorer.score, PROMPT, responses))


def test_the_reward_is_the_weighted_sum_and_every_value_is_a_part() -> None:
    entries = [
        {"name": "exact_match"},
        mine("level", weight=0.5, scale=3),
        mine("Counts", letter="4", weight=-1, part="fours"),
        mine("judge", weight=0),
        mine("tokens", weight=2),
    ]
    first, second = scored(entries, Response(" 4 ", tokens=7, finished=True), Response("5", tokens=1, finished=False))
    assert first == Reward(
        1 + 0.5 * 6 - 1 + 0 + 14, {"exact_match": 1, "level": 6, "fours": 1, "judge": 3, "tokens": 7, "done": 1}
    )
    assert second.value == 0 + 0.5 * 6 - 0 + 0 + 2  # type: ignore[union-attr]


def test_a_reward_of_the_group_comes_last_and_sees_what_the_others_gave() -> None:
    outcomes = scored([mine("Counts", letter="a"), mine("rank", weight=10)], "a", "exit", "aaa")
    assert outcomes[0] == Reward(1 + 30, {"Counts": 1, "rank": 3})
    assert outcomes[2] == Reward(3 + 10, {"Counts": 3, "rank": 1})
    failure = outcomes[1]
    assert isinstance(failure, SampleFailure)
    assert (failure.cause, "SystemExit" in failure.error) == ("score_error", True)


def test_an_answer_of_the_group_of_another_length_fails_it_by_name() -> None:
    for outcome in scored([mine("rank")], "odd", "b"):
        assert isinstance(outcome, SampleFailure)
        assert "it gave 1 rewards for a group of 2 responses" in outcome.error
        assert "in reward mine.py:rank" in outcome.error


@pytest.mark.parametrize("number", [True, np.float32(0.5), np.array(0.5), torch.tensor(0.5), np.bool_(False)], ids=repr)
def test_numbers_of_every_library_are_rewards_also_of_a_group(number: Any, tmp_path: Path) -> None:
    from asyncrl.collectors.rewards.function import Kind, RewardFunction
    from asyncrl.collectors.rewards.total import RewardSum

    def alone(prompt: Prompt, response: str) -> Any:
        return number

    def whole(prompt: Prompt, responses: Sequence[str]) -> Any:
        return torch.full((len(responses),), float(number))

    functions = [RewardFunction(call.__name__, call.__name__, 1.0, Kind.of(call, ""), call) for call in (alone, whole)]
    judge = RewardSum(functions)
    assert judge.score(PROMPT, "") == Reward(float(number), {"alone": number})
    assert judge.score_group(PROMPT, ["", ""], [0.0, 0.0])[1] == Reward(float(number), {"whole": float(number)})


@pytest.mark.parametrize("given", ["'1'", "None", "'x', 'y'"])
def test_text_and_none_are_refused_by_name(given: str, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(f"def score(prompt, response):\n    return {given}\n", encoding="utf-8")
    outcome = scored([{"name": "odd.py:score"}], "a")[0]
    assert isinstance(outcome, SampleFailure)
    assert "it must be a number" in outcome.error
    # The last words of a run show this line alone.
    assert outcome.error.endswith("it must be a number, in reward odd.py:score")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"name": "exact_mach"}, "did you mean exact_match"),
        ({"name": "mine.py"}, "Write mine.py:function"),
        ({"name": "there_is_none.py:score"}, "no such file"),
        (mine("lvl"), "did you mean level"),
        (mine("trl"), r"takes \(prompts, completions\); a reward takes \(prompt, response\)"),
        (mine("named"), r"takes \(\*, prompt, response=None\); a reward takes \(prompt, response\)"),
        (mine("stream"), "is a generator, because it has a yield"),
        (mine("Mute"), "objects cannot be called"),
        (mine("Greedy"), r"takes \(prompt, response, answer\)"),
        (mine("answers"), "needs answer; set it in its entry"),
        (mine("number"), "is 3, which cannot be called"),
        (mine("level", scael=2), "no parameter 'scael'; did you mean scale"),
        (mine("level", prompt=2), "no parameter 'prompt'"),
        (mine("Counts"), "needs letter"),
        (mine("Counts", letter=3), "letter is 3; it must be str"),
        (mine("level", part="version"), "every group has a tag of that name"),
        ({"name": "regex", "pattern": "("}, "is not a regular expression"),
        (mine("level", weight=math.inf), "has the weight inf; it must be a finite number"),
        (mine("level", part="a b"), "it must be a name of letters"),
        ({"name": ":score"}, "write it as module:function"),
        ({"name": "length"}, "exactly one of them must be set"),
    ],
)
def test_a_reward_that_cannot_work_is_refused_at_the_start(entry: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=words):
        load_rewards([entry])


def test_two_rewards_with_one_part_are_refused_with_the_remedy() -> None:
    load([mine("level"), mine("level", part="again")])
    with pytest.raises(ConfigError, match=r"mine.py:level and mine.py:level both have the part 'level'; give one"):
        load([mine("level"), mine("level")])


def test_a_task_is_scored_once() -> None:
    rewards = load_rewards([{"name": "exact_match"}])
    assert prepare_task("mine.py:Sums", {}, warm_up=False, rewards=rewards).prompts[0].answer == "2"
    with pytest.raises(ConfigError, match=r"Sums has no score, and reward.functions is empty"):
        prepare_task("mine.py:Sums", {}, warm_up=False)
    with pytest.raises(ConfigError, match=r"Given scores its responses itself, and reward.functions has exact_match"):
        prepare_task("mine.py:Given", {}, warm_up=False, rewards=rewards)


def load(entries: list[dict[str, Any]]) -> None:
    load_config("default", {"reward.functions": entries})


def built_in(name: str, response: str, prompt: Prompt = PROMPT, **parameters: Any) -> float:
    value = load_rewards([{"name": name, **parameters}])[0].call(prompt, response)
    assert isinstance(value, float)
    return value


@pytest.mark.parametrize(
    ("name", "response", "parameters", "reward"),
    [
        ("exact_match", "4\n", {}, 1),
        ("exact_match", "44", {}, 0),
        ("exact_match", "2", {"field": "level"}, 1),
        ("exact_match", "so\n 4 \n\n", {"last_line": True}, 1),
        ("exact_match", "answer: 5, no, answer: 4", {"extract": r"answer: (\d+)"}, 1),
        ("exact_match", "none", {"extract": r"\d"}, 0),
        ("regex", "a 4 b", {"pattern": r"\d"}, 1),
        ("regex", "a 4 b", {"pattern": r"\d", "mode": "fullmatch"}, 0),
        ("format", "<think>a\n</think>\n<answer>4</answer> ", {}, 1),
        ("format", "<think>a</think><answer>4</answer>x", {}, 0),
        ("format", "<think>a</think><think>a</think><answer>4</answer>", {}, 0),
        ("format", "<answer>4</answer>", {"tags": ["answer"]}, 1),
        ("length", Response("", tokens=15), {"target": 10}, 0.5),
        ("length", Response("", tokens=90), {"limit": 100, "margin": 20}, -0.5),
        ("length", Response("", tokens=80), {"limit": 100, "margin": 20}, 0),
        ("length", Response("", tokens=101), {"limit": 100}, -1),
        ("length", "abc", {"target": 3, "unit": "characters"}, 1),
    ],
)
def test_built_in_rewards(name: str, response: str, parameters: dict[str, Any], reward: float) -> None:
    assert built_in(name, response, **parameters) == reward


@pytest.mark.parametrize("name", ["exact_match", "math_verify", "code"])
def test_a_prompt_without_what_a_reward_reads_is_refused_before_the_run(name: str) -> None:
    (reward,) = load_rewards([{"name": name, "field": "solution"}])
    with pytest.raises(ConfigError, match=f"reward {name} cannot score what it will be given: prompt 3 has .*solution"):
        reward.check_prompt(PROMPT)
    (other,) = load_rewards([{"name": "format"}])
    other.check_prompt(PROMPT)


def test_a_record_without_the_field_is_an_error_and_not_a_zero() -> None:
    with pytest.raises(ValueError, match="prompt 3 has no field 'solution'; it has level"):
        built_in("exact_match", "4", field="solution")


def test_a_column_called_answer_is_not_the_answer_where_the_data_says_otherwise() -> None:
    """`data.answer_column` is null, or names a column that is empty here."""
    (reward,) = load_rewards([{"name": "exact_match"}])
    with pytest.raises(ConfigError, match=r"prompt 0 has no answer; name its field in data\.answer_column"):
        reward.check_prompt(Prompt(0, "2+2=", "", fields={"answer": "5"}))
    reward.check_prompt(Prompt(0, "say nothing", "", fields={"answer": ""}))


@pytest.mark.parametrize(("response", "reward"), [(r"so \boxed{\frac{1}{2}}", 1), ("The answer is 0.5", 1), ("2", 0)])
def test_math_verify_compares_values(response: str, reward: float) -> None:
    assert built_in("math_verify", response, Prompt(0, "half?", "$1/2$")) == reward


def test_a_program_is_run_within_its_limits() -> None:
    tests = [{"input": "2\n", "output": "4"}, {"input": "3", "output": "6"}, {"input": "x", "output": "2"}]
    prompt = Prompt(0, "double", fields={"tests": tests})
    assert built_in("code", "```python\nprint(2 * int(input()))\n```", prompt) == pytest.approx(2 / 3)
    assert built_in("code", "print(2 * int(input()))", prompt, all_or_nothing=True) == 0
    one = Prompt(0, "wait", fields={"tests": '[{"output": "ok"}]'})
    assert built_in("code", "print('ok')", one) == 1
    assert built_in("code", "import time\nprint('ok', flush=True)\ntime.sleep(60)", one, seconds=0.5) == 0
    assert built_in("code", "x = bytearray(10**9)\nprint('ok')", one, memory_mb=128) == 0


def test_a_response_travels_whole_to_the_process_that_scores() -> None:
    import pickle

    response = pickle.loads(pickle.dumps(Response("a", tokens=3, finished=False)))
    assert (response, response.tokens, response.finished) == ("a", 3, False)


def test_not_a_number_stays_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "nan.py").write_text("def score(prompt, response):\n    return float('nan')\n", encoding="utf-8")
    outcome = scored([{"name": "nan.py:score"}], "a")[0]
    assert isinstance(outcome, Reward)
    assert math.isnan(outcome.value)
