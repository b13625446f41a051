"""Rollouts of the real package verifiers: what reaches the trainer of what they asked, and rewards, parts and failures.

They start its servers, and a process for the tools; where it is not installed they are skipped.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.collectors.collector import sample_seed
from asyncrl.collectors.engines.base import Request
from asyncrl.collectors.environments.load import load_environment
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.records.columns import LOGPROBS, TOKENS

TASKSET = '''
import asyncio

import verifiers.v1 as vf

__all__ = ["Digits"]


class DigitData(vf.TaskData):
    answer: str


class Tools(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def after(self, digit: int) -> str:
        """Return the digit behind one."""
        if digit == 9:
            raise ValueError("there is none")
        return str(digit + 1)


class Digit(vf.Task[DigitData]):
    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.branches[-1].messages[-1].content == self.data.answer)

    @vf.reward
    async def brave(self, trace: vf.Trace) -> float:
        if self.data.answer == "8":
            raise RuntimeError("no judge")
        if self.data.answer == "7":
            await asyncio.sleep(300.0)
        return 0.25

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return trace.num_turns


class Digits(vf.Taskset[Digit]):
    def load(self):
        for i in range(10):
            yield Digit(DigitData(prompt=f"{i}>", system_prompt="Say.", answer=str(i)), self.config.task)
'''
WITH_TOOLS = """
    @classmethod
    def toolsets(cls, config):
        return [Tools(vf.ToolsetConfig())]


if __name__ == "__main__":
    Tools.run()
"""


@pytest.fixture(autouse=True)
def _tasksets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("verifiers.v1")
    for name, text in (("asked_digits", TASKSET), ("digits_with_tools", TASKSET + WITH_TOOLS)):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    yield
    for name in ("asked_digits", "digits_with_tools"):
        sys.modules.pop(name, None)


def asked(chat_ml: Any, text: str, tools: str = "") -> list[int]:
    marks = "<|im_start|>system\nSay.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return list(chat_ml.encode(tools + marks.format(text)))


def test_a_rollout_reaches_the_trainer_with_the_rewards_of_its_task(table: Any, chat_ml: Any) -> None:
    environment = load_environment("verifiers", {"taskset": "asked_digits", "select": {"limit": 5}})
    prompts = environment.prompts()
    assert [(prompt.id, prompt.text, prompt.dataset) for prompt in prompts][3:] == [
        (3, "3>", "asked_digits"),
        (4, "4>", "asked_digits"),
    ]

    def say(request: Request) -> Sequence[int]:
        """3, or 7 in every second sample."""
        return [*chat_ml.encode("7" if request.seed == sample_seed(3, 0, 1) else "3"), 2]

    async def work(at: Any) -> Any:
        return await at.group(prompts[3], size=2)

    group, columns = table(environment, say, work, tokenizer=chat_ml, size=2, max_tokens=900)
    front = asked(chat_ml, "3>")
    assert columns[TOKENS][0].tolist() == [*front, *chat_ml.encode("3"), 2]
    assert columns[TOKENS][1].tolist() == [*front, *chat_ml.encode("7"), 2]
    assert group.prompt_tokens == len(front)
    assert columns[LOGPROBS][0].tolist() == [pytest.approx(-0.1)] * 2
    assert group.rewards == (0.75, 0.25)
    assert [group.tags[name] for name in ("right", "brave", "turns")] == [[1.0, 0.0], [0.25] * 2, [1.0] * 2]
    assert group.statuses == ("finished", "finished")
    assert "generated" not in group.tags


def test_calls_of_a_toolset_come_back_token_by_token(table: Any, chat_ml: Any) -> None:
    """The error of a tool is told to the model."""
    environment = load_environment("verifiers", {"taskset": "digits_with_tools"})
    call = '<tool_call>{{"name": "tools_after", "arguments": {{"digit": {}}}}}</tool_call>'
    turns = [call.format(9), call.format(2), "3"]

    def say(request: Request) -> Sequence[int]:
        return [*chat_ml.encode(turns[chat_ml.decode(list(request.prompt_ids)).count("<tool_response>")]), 2]

    async def work(at: Any) -> Any:
        return await at.group(environment.prompts()[3])

    group, columns = table(environment, say, work, tokenizer=chat_ml, max_tokens=2000, step_timeout_s=100.0)
    ids = columns[TOKENS][0].tolist()
    text = chat_ml.decode(ids)
    assert "<tool_response>3</tool_response>" in text
    assert "there is none</tool_response>" in text
    assert group.rewards == (0.75,)
    assert group.tags["turns"] == [3.0]
    front = asked(chat_ml, "3>", "[tools_after]")
    made = [[*chat_ml.encode(turn), 2] for turn in turns]
    spans = [tuple(map(int, span.split(":"))) for span in group.tags["generated"][0].split(",")]
    assert ids[: len(front)] == front
    assert [ids[len(front) :][first:end] for first, end in spans] == made


def test_what_fails_in_a_rollout_fails_its_sample(table: Any, chat_ml: Any) -> None:
    environment = load_environment("verifiers", {"taskset": "asked_digits"})
    prompts = environment.prompts()

    def work(number: int) -> Any:
        return lambda at: at.group(prompts[number])

    failure, _ = table(environment, lambda _: [*chat_ml.encode("8"), 2], work(8), tokenizer=chat_ml, max_tokens=900)
    assert failure.reason == "environment_error"
    assert "RuntimeError: no judge" in failure.error
    more = {"tokenizer": chat_ml, "max_tokens": 900, "step_timeout_s": 1.0}
    failure, _ = table(environment, lambda _: [*chat_ml.encode("8"), 2], work(7), **more)
    assert failure.reason == "environment_timeout"


def test_a_limit_of_tokens_leaves_the_rewards_so_far(table: Any, chat_ml: Any) -> None:
    """The first turn is cut, and calls no tool: the sample is truncated, and scored as it is."""
    environment = load_environment("verifiers", {"taskset": "asked_digits"})
    prompts = environment.prompts()

    async def work(at: Any) -> Any:
        return await at.group(prompts[3])

    group, _ = table(
        environment, lambda _: chat_ml.encode("3333"), work, tokenizer=chat_ml, max_tokens=900, max_turn_tokens=2
    )
    assert group.statuses == ("truncated",)
    assert group.rewards == (0.25,)


def test_what_cannot_be_trained_is_refused_with_its_reason() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"taskset": "no_such_taskset"}, "no_such_taskset"),
        ({"taskset": "asked_digits", "agent": {"retries": {"max_retries": 2}}}, r"agent\.retries is set"),
        ({"taskset": "asked_digits", "agent": {"sampling": {"temperature": 0.5}}}, "rollout.temperature"),
        ({"taskset": "asked_digits", "agent": {"client": {"type": "eval"}}}, "must be the model in training"),
        ({"taskset": "asked_digits", "ajent": {}}, "ajent"),
        ({"taskset": "asked_digits", "id": "user_sim"}, "must be the model in training"),
    ]
    for options, why in refused:
        with pytest.raises(ConfigError, match=why):
            load_environment("verifiers", options)
    with pytest.raises(ConfigError, match="evaluate is missing"):
        load_environment("verifiers", {"taskset": "asked_digits"}).evaluation_prompts()
    split = load_environment("verifiers", {"taskset": "asked_digits", "evaluate": {"skip": 7}})
    assert [prompt.id for prompt in split.prompts()] == list(range(7))
    assert [prompt.id for prompt in split.evaluation_prompts()] == [7, 8, 9]
