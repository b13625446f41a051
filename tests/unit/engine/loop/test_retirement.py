"""A prompt that fails again and again is left out; a single one does not end a run, and all of them do."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from asyncrl.collectors.generators.base import Completion, GroupRequest
from asyncrl.engine.errors import GenerationError
from asyncrl.engine.events.types import Dispatched, GroupFailed
from asyncrl.engine.loop.retirement import Retirement
from asyncrl.engine.model.tokenizer import CharTokenizer
from asyncrl.engine.records import Prompt
from asyncrl.engine.testing.fakes import FakeGenerator, FakeTask
from asyncrl.engine.testing.simulation import Outcome, simulate, simulated_config


class TooLong(FakeGenerator):
    """Raises for the prompts in `bad`."""

    bad: tuple[str, ...] = ()

    async def generate(self, request: GroupRequest) -> Sequence[Completion]:
        if CharTokenizer().decode(list(request.prompt_ids)) in self.bad:
            raise ValueError("too long for the model")
        return await super().generate(request)


def run_with(*bad: str, prompts: int = 10, **given: Any) -> Outcome:
    generator = TooLong()
    generator.bad = bad
    config = simulated_config(run__steps=40, rollout__max_staleness=1, **given)
    return simulate(config, generators=[generator], task=FakeTask(prompts))


def test_one_bad_prompt_of_ten_fails_alone_and_is_retired() -> None:
    """FOUND-C9: it is issued three times, and passed over in each epoch after that."""
    outcome = run_with("3>")
    assert (outcome.ending.code, outcome.progress.steps) == (0, 40)
    failed = outcome.of(GroupFailed)
    assert len(failed) == 3
    assert all(event.error.startswith("prompt 3: ") and "too long for the model" in event.error for event in failed)
    issued = Counter(event.prompt for event in outcome.of(Dispatched))
    assert issued[3] == 3
    assert min(issued[i] for i in range(10) if i != 3) > 6


def test_one_bad_prompt_does_not_end_a_run_by_failing_in_a_row() -> None:
    """FOUND-C9: two prompts, and the bad one falls often in a row while the other is generated."""
    outcome = run_with("1>", prompts=2, collector__max_failures_in_a_row=2, task__retire_after=50)
    assert (outcome.ending.code, outcome.progress.steps) == (0, 40)


def test_when_every_prompt_is_retired_the_run_ends_with_the_cause() -> None:
    outcome = run_with("0>", "1>", prompts=2, collector__max_failures_in_a_row=100)
    assert outcome.ending.code == 1
    assert isinstance(outcome.ending.error, GenerationError)
    assert "no prompt is left: each of 2 has failed 3 times (task.retire_after)" in str(outcome.ending.error)
    assert "too long for the model" in str(outcome.ending.error)


def test_failures_with_a_good_group_between_retire_no_prompt() -> None:
    retirement = Retirement(2, prompts=2)
    prompt = Prompt("a", "a")
    for _ in range(5):
        retirement.failed(prompt, "score_error", "judge is down")
        retirement.succeeded("a")
    assert not retirement.passes_over(prompt)
    for _ in range(2):
        retirement.failed(prompt, "score_error", "judge is down")
    assert [retirement.passes_over(prompt) for _ in range(3)] == [True] * 3
    assert retirement.retired == {"a": 3}


def test_null_retires_no_prompt() -> None:
    retirement = Retirement(None, prompts=1)
    for _ in range(100):
        retirement.failed(Prompt(0, "0"), "timeout", "")
    assert not retirement.retired
