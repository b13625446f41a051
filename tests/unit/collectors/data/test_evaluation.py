"""The prompts of evaluations from data sets: those held out of training, or those of sets of their own."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.collectors.data.evaluation import evaluation_records
from asyncrl.collectors.data.prepare import with_data
from asyncrl.collectors.tasks.prepared import prepare_task
from asyncrl.configs import load_config
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.records import Prompt

Write = Callable[[str, Sequence[Any]], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(name: str, records: Sequence[Any]) -> str:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
        return str(path)

    return written


def records(first: int, count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{n}>", "answer": n} for n in range(first, first + count)]


def evaluated(values: dict[str, Any]) -> list[Prompt]:
    return evaluation_records(load_config("default", values))


def test_what_training_never_draws_is_evaluated_and_nothing_else(write: Write) -> None:
    values = {"data.path": write("train", records(0, 200)), "data.holdout": 0.2, "task.epochs": 1}
    task = prepare_task("echo", {}, warm_up=False, lists=False)
    stream = with_data(load_config("default", values), task).stream
    assert stream is not None
    trained, held_out = {prompt.id for prompt in stream}, {prompt.id for prompt in evaluated(values)}
    assert len(held_out) == pytest.approx(40, abs=15)
    assert not trained & held_out
    assert trained | held_out == {f"train:{n}" for n in range(1, 201)}


def test_a_part_of_the_prompts_is_the_same_for_every_seed_and_has_some_of_each_set(write: Write) -> None:
    sets = [{"path": write("few", records(0, 3))}, {"path": write("many", records(10, 50)), "name": "others"}]
    parts = [evaluated({"evaluation.sets": sets, "evaluation.max_prompts": 10, "run.seed": seed}) for seed in (0, 7)]
    assert [prompt.id for prompt in parts[0]] == [prompt.id for prompt in parts[1]]
    datasets = [prompt.dataset for prompt in parts[0]]
    assert (datasets.count("few"), datasets.count("others")) == (3, 7)


def test_lengths_and_bad_records_are_as_in_training(write: Write) -> None:
    path = write("test", [*records(0, 5), {"prompt": "123456>", "answer": 1}, {"no": 1}])
    values = {"evaluation.path": path, "data.max_prompt_tokens": 5, "data.on_bad_record": "skip"}
    assert len(evaluated(values)) == 5
    with pytest.raises(ConfigError, match=r"test\.jsonl, line 7 has no field 'prompt'"):
        evaluated({**values, "data.on_bad_record": "error"})
    with pytest.raises(ConfigError, match=r"evaluation\.path or evaluation\.sets have no prompt of 30 to 40 tokens"):
        evaluated({**values, "data.min_prompt_tokens": 30, "data.max_prompt_tokens": 40})


def test_a_holdout_that_holds_out_nothing_is_refused(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"of 3 records none is both among those held out \(data.holdout 1e-06\)"):
        evaluated({"data.path": write("train", records(0, 3)), "data.holdout": 1e-6})


def test_a_set_may_be_a_path_alone(write: Write) -> None:
    assert len(evaluated({"evaluation.sets": [write("one", records(0, 2)), write("two", records(2, 2))]})) == 4


def test_two_records_with_one_id_are_refused(write: Write) -> None:
    path = write("test", [{"prompt": "1>", "answer": 1, "key": 5}, {"prompt": "2>", "answer": 2, "key": 5}])
    with pytest.raises(ConfigError, match="two records have the id 5"):
        evaluated({"evaluation.path": path, "data.id_column": "key"})
