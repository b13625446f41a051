"""What is asked of a task before a run: once, whatever it raises, and in plain types from then on."""

import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from asyncrl.collectors.tasks import Task
from asyncrl.collectors.tasks.prepared import prepare_task
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.events.types import Dispatched
from asyncrl.engine.records import Prompt
from asyncrl.engine.testing.fakes import FakeTask
from asyncrl.engine.testing.simulation import simulate, simulated_config
from asyncrl.engine.testing.trace import recording_of
from asyncrl.engine.trace.cutting import anonymised
from asyncrl.engine.trace.recording import Recording
from asyncrl.engine.trace.replay import replay
from asyncrl.filters.statistics import RunningStatistics


class Given(Task):
    """Prompts as given; counts what it is asked."""

    asked: list[str] = []  # noqa: RUF012

    def __init__(self, prompts: Any = None, raises: BaseException | None = None, where: str = "") -> None:
        self.asked.append("init")
        self.given = [Prompt(0, "0>", {"not": "text"})] if prompts is None else prompts  # type: ignore[arg-type]
        self.raises, self.where = raises, where
        self._may_raise("init")

    def _may_raise(self, where: str) -> None:
        if self.raises is not None and where == self.where:
            raise self.raises

    def prompts(self) -> Sequence[Prompt]:
        self.asked.append("prompts")
        self._may_raise("prompts")
        return self.given

    def examples(self) -> Sequence[tuple[str, str]]:
        self.asked.append("examples")
        self._may_raise("examples")
        return super().examples()

    def score(self, prompt: Prompt, response: str) -> float:
        return 0.0


@pytest.fixture(autouse=True)
def asked() -> Iterator[list[str]]:
    module = ModuleType("given_task")
    module.__dict__["Given"] = Given
    sys.modules["given_task"] = module
    Given.asked.clear()
    yield Given.asked
    del sys.modules["given_task"]


def prepared(warm_up: bool = False, **options: Any) -> Any:
    return prepare_task("given_task:Given", options, warm_up=warm_up)


def test_user_code_is_asked_once_and_for_examples_only_before_a_warm_up(asked: list[str]) -> None:
    """FOUND-C19, FOUND-I17: an answer need not be text where no warm-up learns from it."""
    assert prepared().examples == ()
    assert asked == ["init", "prompts"]
    with pytest.raises(ConfigError, match=r"example number 0 is \('0>', \{'not': 'text'\}\).*sft_warm_up_steps"):
        prepared(warm_up=True)
    assert prepared(warm_up=True, prompts=[Prompt(0, "0>", "0")]).examples == [("0>", "0")]


@pytest.mark.parametrize("where", ["init", "prompts", "examples"])
@pytest.mark.parametrize("error", [KeyError("no data"), SystemExit(0), GeneratorExit(), ZeroDivisionError()], ids=repr)
def test_whatever_user_code_raises_before_a_run_is_refused_in_one_line(where: str, error: BaseException) -> None:
    """FOUND-C19."""
    with pytest.raises(ConfigError) as caught:
        prepared(warm_up=True, raises=error, where=where)
    text = str(caught.value)
    assert "given_task:Given" in text
    assert type(error).__name__ in text
    assert "\n" not in text


def test_an_interrupt_while_user_code_runs_is_still_one() -> None:
    with pytest.raises(KeyboardInterrupt):
        prepared(raises=KeyboardInterrupt(), where="prompts")


@pytest.mark.parametrize(
    ("ids", "plain"),
    [
        (["a", "b"], ["a", "b"]),
        ([np.int64(3), np.uint8(4)], [3, 4]),
        ([np.str_("x"), 1], ["x", 1]),
        (["1", 1], ["1", 1]),
    ],
)
def test_ids_are_strings_or_integers_and_plain(ids: list[Any], plain: list[int | str]) -> None:
    """FOUND-I4: NumPy's come as Python's, which a log can write."""
    found = [prompt.id for prompt in prepared(prompts=[Prompt(i, "0>") for i in ids]).prompts]
    assert found == plain
    assert [type(i) for i in found] == [type(i) for i in plain]


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([Prompt(0, "a"), Prompt(1.0, "a")], "prompt number 1 has the id 1.0, of type float"),  # type: ignore[arg-type]
        ([Prompt(None, "a")], "prompt number 0 has the id None"),  # type: ignore[arg-type]
        ([Prompt(True, "a")], "prompt number 0 has the id True, of type bool"),
        ([Prompt(2**63, "a")], "64 bits"),
        ([Prompt("a", "a"), Prompt("b", "a"), Prompt("a", "b")], "prompts number 0 and 2 both have 'a'"),
        ([Prompt(0, b"a")], "prompt number 0, id 0, has b'a' as its text; it must be a string"),  # type: ignore[arg-type]
        ([Prompt(0, "a", dataset=None)], "has None as its dataset"),  # type: ignore[arg-type]
        (["text"], "prompt number 0 is 'text'; it must be a Prompt"),
        (7, r"prompts\(\) failed"),
        ([], "has no prompts; list some"),
    ],
)
def test_prompts_that_no_run_could_take_are_refused_by_number_and_value(prompts: Any, words: str) -> None:
    """FOUND-I4."""
    with pytest.raises(ConfigError, match=words):
        prepared(prompts=prompts)


class Named(FakeTask):
    def prompts(self) -> Sequence[Prompt]:
        return [Prompt(f"q-{i}" if i else 7, f"{i}>", str(i), "fake") for i in range(self._prompts)]


def test_a_run_whose_prompts_are_named_by_strings_is_logged_and_replays() -> None:
    """FOUND-I4: tags, log, length bias and statistics take them."""
    task = Named(4, lambda prompt, index: float(index % 2))
    outcome = simulate(simulated_config(run__steps=4, rollout__max_staleness=1), task=task)
    assert outcome.ending.code == 0
    assert {event.prompt for event in outcome.of(Dispatched)} == {7, "q-1", "q-2", "q-3"}
    recording = recording_of(outcome)
    assert replay(recording).difference is None
    hidden = list(anonymised(recording.events))
    assert "q-1" not in repr(hidden)
    assert replay(Recording(hidden)).difference is None
    statistics = RunningStatistics()
    statistics.load_state_dict({"prompts": {"1": [1, 4, 2.0], '"1"': [2, 8, 2.0]}, "datasets": {}})
    assert {prompt: tally.groups for prompt, tally in statistics.prompts.items()} == {1: 1, "1": 2}
    assert set(statistics.state_dict()["prompts"]) == {"1", '"1"'}
