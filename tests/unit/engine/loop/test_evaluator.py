"""Evaluations beside training, in virtual time: one version each, and nothing of them in training."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncrl.collectors.generators.base import Completion, GroupRequest
from asyncrl.engine.errors import NotWritten
from asyncrl.engine.events.types import (
    Dispatched,
    Evaluated,
    EvaluationEnded,
    EvaluationFailed,
    EvaluationStarted,
    Published,
    Put,
    StepEnded,
)
from asyncrl.engine.loop.controller import Controller
from asyncrl.engine.loop.model_saver import ModelSaver, SaverSettings
from asyncrl.engine.model.folder import Note, replace_folder
from asyncrl.engine.records.scores import score
from asyncrl.engine.testing.fakes import FakeGenerator, FakeTask
from asyncrl.engine.testing.simulation import Outcome, simulate, simulated_config


def evaluated(generator: FakeGenerator | None = None, *, every: int = 2, steps: int = 6, **values: Any) -> Outcome:
    """Run steps of one second, with evaluations of the four prompts of the task."""
    options = {name: values.pop(name) for name in ("beside", "saver", "task") if name in values}
    config = simulated_config(run__steps=steps, evaluation__every=every, **values)
    return simulate(config, evaluator=generator or FakeGenerator(), **options)


def versions(outcome: Outcome, kind: type[Any]) -> list[int]:
    return [event.version for event in outcome.of(kind)]


def test_each_evaluation_is_of_one_version_while_others_are_published() -> None:
    """CASE-H6: answers take three seconds, and meanwhile training goes on and publishes."""
    outcome = evaluated(FakeGenerator(seconds=lambda _: 3.0), every=4, steps=10)
    assert outcome.ending.code == 0
    assert versions(outcome, EvaluationEnded) == [0, 4, 8, 10]
    during: dict[int, list[int]] = {}
    under_way = -1
    for event in outcome.events:
        if isinstance(event, EvaluationStarted):
            under_way = event.version
        elif isinstance(event, EvaluationEnded):
            under_way = -1
        elif isinstance(event, Published) and under_way >= 0:
            during.setdefault(under_way, []).append(event.version)
        elif isinstance(event, Evaluated):
            assert event.version == under_way
    assert len(during[4]) >= 2
    assert max(during[4]) > 4
    assert not outcome.of(EvaluationFailed)


def test_nothing_of_an_evaluation_is_counted_trained_or_left() -> None:
    """The same run without evaluations has the same ledger, groups and steps, to the event."""
    with_them, without = evaluated(every=2), simulate(simulated_config(run__steps=6))
    assert with_them.keys_left == []
    assert with_them.ledger.summary() == without.ledger.summary()
    for one, other in (
        (with_them.of(Dispatched), without.of(Dispatched)),
        (with_them.of(Put), without.of(Put)),
    ):
        assert sorted(event.group for event in one) == sorted(event.group for event in other)
    trained, expected_trained = (
        [(step, sorted(keys)) for step, keys in outcome.ranks[0].trained] for outcome in (with_them, without)
    )
    assert trained == expected_trained
    assert with_them.progress.generated_tokens == without.progress.generated_tokens
    # The last evaluation comes after the last step, and holds none up.
    assert [event.t for event in with_them.of(StepEnded)] == [event.t for event in without.of(StepEnded)]


def test_a_store_with_room_for_one_group_more_is_enough() -> None:
    """Run-ahead takes six rows; what is evaluated is taken out group by group."""
    assert evaluated(data_plane__capacity_rows=7).ending.code == 0


def test_figures_follow_from_the_answers_in_the_log() -> None:
    task = FakeTask(4, lambda prompt, index: float(index < prompt))
    outcome = evaluated(every=10, task=task, evaluation__samples=4, evaluation__temperature=1.0)
    first, last = outcome.of(EvaluationEnded)
    answers = [event for event in outcome.of(Evaluated) if event.version == 0]
    assert first.scores == score(answers, samples=4, pass_reward=1.0) == last.scores
    assert first.scores.pass_at_1 == (0 + 1 / 4 + 2 / 4 + 3 / 4) / 4
    assert outcome.progress.evaluations.metrics()["evaluation/pass_at_1"] == first.scores.pass_at_1
    assert first.datasets == {"fake": first.scores}


def test_the_first_and_the_last_version_are_evaluated_as_asked() -> None:
    for start, end, expected in ((True, True, [0, 4, 5]), (False, True, [4, 5]), (False, False, [4])):
        outcome = evaluated(every=4, steps=5, evaluation__at_start=start, evaluation__at_end=end)
        assert versions(outcome, EvaluationEnded) == expected


def test_a_version_that_is_due_while_another_is_evaluated_is_left_out_and_the_last_one_is_not() -> None:
    outcome = evaluated(FakeGenerator(seconds=lambda _: 3.5), every=1, steps=6)
    done, skipped = versions(outcome, EvaluationEnded), outcome.of(EvaluationFailed)
    assert done[-1] == 6
    assert sorted([*done, *(event.version for event in skipped)]) == list(range(7))
    assert all(event.skipped and "raise evaluation.every" in event.error for event in skipped)
    assert outcome.progress.evaluations.skipped == len(skipped) > 0


def _fails(call: int) -> None:
    if call < 4:
        raise RuntimeError("out of memory")


def test_an_evaluation_that_fails_is_counted_and_training_goes_on() -> None:
    """CASE-H6: the four answers of version 0 fail; later versions are evaluated."""
    outcome = evaluated(FakeGenerator(fail=_fails))
    assert (outcome.ending.code, outcome.progress.steps) == (0, 6)
    [failed] = outcome.of(EvaluationFailed)
    assert "none of 4 prompts has a scored sample" in failed.error
    assert "out of memory" in failed.error
    assert versions(outcome, EvaluationEnded) == [2, 4, 6]
    assert outcome.progress.evaluations.failed == 1
    assert outcome.keys_left == []


def test_an_evaluation_that_hangs_is_given_up_and_the_next_one_is_whole() -> None:
    hangs = FakeGenerator(seconds=lambda call: 1e6 if call == 2 else 0.1)
    outcome = evaluated(hangs, every=3, evaluation__timeout_s=1.0)
    [failed] = outcome.of(EvaluationFailed)
    assert "took longer than 1 s (evaluation.timeout_s): 3 of 4 prompts were answered" in failed.error
    assert versions(outcome, EvaluationEnded) == [3, 6]
    assert [ended.scores.prompts for ended in outcome.of(EvaluationEnded)] == [4, 4]
    assert (outcome.ending.code, outcome.keys_left) == (0, [])


class OfAnother(FakeGenerator):
    """An engine that somebody else has brought to version 9."""

    async def generate(self, request: GroupRequest) -> Sequence[Completion]:
        self.version = 9
        return await FakeGenerator.generate(self, request)


def test_an_answer_of_another_version_is_no_part_of_an_evaluation() -> None:
    """CASE-H6: such an evaluation fails, and training goes on without further ones."""
    outcome = evaluated(OfAnother())
    assert outcome.ending.code == 0
    assert "was answered by versions [0, 9] in the evaluation of version 0" in outcome.of(EvaluationFailed)[0].error
    assert not outcome.of(EvaluationEnded)
    assert outcome.keys_left == []


def test_an_evaluator_that_refuses_weights_costs_no_step() -> None:
    def refuse(version: int) -> float:
        if version == 2:
            raise RuntimeError("no such weights")
        return 0.0

    outcome = evaluated(FakeGenerator(refuse=refuse))
    assert outcome.ending.code == 0
    assert versions(outcome, EvaluationFailed) == [2]
    assert versions(outcome, EvaluationEnded) == [0, 4, 6]


def test_an_interrupted_run_waits_for_no_evaluation() -> None:
    async def interrupt(controller: Controller) -> None:
        await anyio.sleep(4.5)
        controller.interrupt()

    outcome = evaluated(FakeGenerator(seconds=lambda _: 1e6), beside=interrupt, steps=100)
    assert outcome.ending.code == 130
    assert outcome.seconds < 20
    assert "the run ended" in outcome.of(EvaluationFailed)[-1].error
    assert outcome.keys_left == []


class Holder:
    """A rank that writes a folder with a note, and counts as many versions as it was asked for."""

    def __init__(self, outcome: Callable[[], int], *, full: tuple[int, ...] = ()) -> None:
        self._version = outcome
        self._full = full

    async def hold_weights(self) -> int:
        return self._version()

    async def save_held(self, folders: Any, note: Note) -> None:
        await anyio.sleep(0.4)
        if note.version in self._full:
            raise NotWritten("model could not be written: No space left on device")
        for folder in folders:
            replace_folder(Path(folder), note.write)


def best(tmp_path: Path, passed: dict[int, float], **values: Any) -> tuple[Outcome, Note | None]:
    """Run six steps with an evaluation every two; `passed` has the reward of all answers by version."""
    generator = FakeGenerator()
    task = FakeTask(4, lambda prompt, index: float(index % 2))
    judge = FakeTask(4, lambda prompt, index: passed[generator.version])

    def saver(progress: Any) -> ModelSaver:
        settings = SaverSettings.of(simulated_config(evaluation__every=2, **values), tmp_path, "0")
        return ModelSaver(settings, Holder(lambda: progress.steps), progress)

    config = simulated_config(run__steps=6, evaluation__every=2, **values)
    outcome = simulate(config, evaluator=generator, task=task, evaluation_task=judge, saver=saver)
    return outcome, Note.read(tmp_path / "model-best")


@pytest.mark.parametrize("save_every", [None, 2])
def test_the_best_model_is_that_of_the_best_evaluation(tmp_path: Path, save_every: int | None) -> None:
    """Version 4 is the best; the rewards of training are the same for all."""
    outcome, note = best(tmp_path, {0: 1.0, 2: 0.0, 4: 1.0, 6: 0.5}, run__save_every=save_every)
    assert outcome.ending.code == 0
    assert note is not None
    assert (note.version, note.best_by, note.evaluation) == (4, "evaluation", {"pass_at_1": 1.0, "reward": 1.0})
    last = Note.read(tmp_path / "model")
    assert last is not None
    assert (last.version, last.evaluation) == (6, {"pass_at_1": 0.0, "reward": 0.5})
    assert not (tmp_path / "model-evaluated").exists()


def test_the_last_version_may_be_the_best_and_of_equals_the_first_is(tmp_path: Path) -> None:
    _, note = best(tmp_path / "last", {0: 0.0, 2: 0.1, 4: 0.2, 6: 0.3})
    assert note is not None
    assert note.version == 6
    _, note = best(tmp_path / "equal", dict.fromkeys((0, 2, 4, 6), 1.0))
    assert note is not None
    assert note.version == 2
