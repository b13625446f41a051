"""Prompts of data sets: checked before the start, drawn one by one, left out by rule and counted."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from asyncrl.collectors.data.check import check_prompts
from asyncrl.collectors.data.prepare import with_data
from asyncrl.collectors.data.prompts import DataPrompts
from asyncrl.collectors.tasks.prepared import PreparedTask, prepare_task
from asyncrl.configs import load_config
from asyncrl.engine.errors import ConfigError, DataError

Given = Callable[..., PreparedTask]
ECHO = [{"prompt": f"{n}>", "answer": n, "note": [n]} for n in range(10)]


def lines(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture
def data(tmp_path: Path) -> Given:
    """Return what prepares records, or several sets of them by name, with options of `data` or any others."""

    def prepared(records: Any = ECHO, **options: Any) -> PreparedTask:
        values = {("data." if "__" not in name else "") + name.replace("__", "."): v for name, v in options.items()}
        if isinstance(records, dict):
            paths = {name: str(lines(tmp_path / f"{name}.jsonl", some)) for name, some in records.items()}
            weights = values.pop("data.weights", {})
            values["data.sets"] = [
                {"path": path, **({"weight": weights[name]} if name in weights else {})} for name, path in paths.items()
            ]
        else:
            values["data.path"] = str(lines(tmp_path / "train.jsonl", records))
        config = load_config("default", values)
        return with_data(config, prepare_task("echo", {}, warm_up=False, lists=False))

    return prepared


def stream(prepared: PreparedTask) -> DataPrompts:
    assert isinstance(prepared.stream, DataPrompts)
    return prepared.stream


def test_a_record_becomes_a_prompt_with_all_its_fields(data: Given) -> None:
    prompts = {prompt.id: prompt for prompt in stream(data(task__epochs=1))}
    assert len(prompts) == 10
    prompt = prompts["train:4"]
    assert (prompt.text, prompt.answer, prompt.dataset) == ("3>", "3", "train")
    assert prompt.fields == ECHO[3]
    hash(prompt)


def test_ids_and_data_sets_come_from_the_columns_that_are_named(data: Given) -> None:
    records = [{"q": f"{n}>", "uid": n, "source": "ab"[n % 2]} for n in range(4)]
    options = {"prompt_column": "q", "answer_column": None, "id_column": "uid", "dataset_column": "source"}
    drawn = list(stream(data(records, task__epochs=1, **options)))
    assert sorted((prompt.id, prompt.text, prompt.answer, prompt.dataset) for prompt in drawn) == [
        (n, f"{n}>", "", "ab"[n % 2]) for n in range(4)
    ]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"prompt": "1>"}, r"train\.jsonl, line 2 has no field 'answer' \(data\.answer_column\); set it to null if"),
        ({"text": "1>", "answer": 1}, r"line 2 has no field 'prompt' .*; its fields are 'text', 'answer'"),
        ({"prompt": 1, "answer": 1}, "line 2, field 'prompt', is 1; it must be a text or a list of chat messages"),
        ({"prompt": "", "answer": 1}, "line 2, field 'prompt', is ''"),
        ({"prompt": "1>", "answer": None}, "line 2, field 'answer', is None"),
        ([1], r"line 2 is \[1\]; a record must be a JSON object"),
        ({"prompt": [{"role": "user", "content": "1>"}], "answer": 1}, "line 2, field 'prompt': chat messages need"),
        ({"prompt": "x y", "answer": 1}, "line 2, field 'prompt', cannot be used: characters"),
    ],
)
def test_a_bad_record_is_named_before_the_start_or_left_out_and_counted(data: Given, record: Any, words: str) -> None:
    records = [ECHO[0], record, ECHO[1]]
    with pytest.raises(ConfigError, match=words):
        data(records)
    if record != {"prompt": "x y", "answer": 1}:  # Without a limit on tokens the collector is the first to count them.
        prompts = stream(data(records, on_bad_record="skip", task__epochs=2))
        assert sorted(prompt.text for prompt in prompts) == ["0>", "0>", "1>", "1>"]
        assert prompts.skipped == {"bad_record": 2}


def test_where_every_record_is_bad_nobody_is_told_to_skip_them(data: Given) -> None:
    with pytest.raises(ConfigError, match=r"no field 'prompt' .* \(and 1 more of the 2 looked at\)$"):
        data([{"question": "1>", "answer": 1}] * 2)
    with pytest.raises(ConfigError, match=r"of the built-in small model \(.*\); with other texts name a checkpoint"):
        data([{"prompt": "What is 1 + 1?", "answer": 2}])


def test_a_holdout_that_leaves_nothing_to_train_on_is_refused(data: Given) -> None:
    with pytest.raises(ConfigError, match=r"data.holdout is 0.9999, which holds out all 10 records, and none is left"):
        data(holdout=0.9999)


def test_two_records_with_one_id_are_both_named(data: Given) -> None:
    with pytest.raises(
        ConfigError, match=r"a\.jsonl, line 1 and .*b\.jsonl, line 2 both have the id 3 \(data\.id_column\)"
    ):
        data({"a": [{**ECHO[3], "id": 3}], "b": [{**ECHO[4], "id": 4}, {**ECHO[5], "id": 3}]}, id_column="id")


def test_a_large_set_is_checked_by_a_sample_and_then_as_it_is_read(
    data: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.collectors.data.check.CHECKED_RECORDS", 1500)
    records = [{"prompt": "1>", "answer": 1}] * 2000
    with pytest.raises(ConfigError, match=r"their longest prompt is not known; set data\.max_prompt_tokens"):
        data(records)
    with pytest.raises(ConfigError, match="line 2000 has no field"):
        data([*records[:-1], {}], max_prompt_tokens=4)
    records[150] = {}
    prompts = stream(data(records, max_prompt_tokens=4, task__epochs=1))
    with pytest.raises(DataError, match="line 151 has no field 'prompt'"):
        list(prompts)


def test_prompts_out_of_the_limits_are_left_out_and_counted(data: Given) -> None:
    records = [{"prompt": "1" * n, "answer": 1} for n in range(1, 11)]
    prepared = data(records, min_prompt_tokens=3, max_prompt_tokens=5, task__epochs=1)
    prompts = stream(prepared)
    assert sorted(len(prompt.text) for prompt in prompts) == [3, 4, 5]
    assert prompts.skipped == {"too_short": 2, "too_long": 5}
    assert max(len(prompt.text) for prompt in prepared.prompts) == 5
    with pytest.raises(ConfigError, match="none of the 10 records looked at has a prompt of 11 to 12 tokens"):
        data(records, min_prompt_tokens=11, max_prompt_tokens=12)


def test_records_that_are_held_out_are_the_same_in_every_run_and_never_drawn(data: Given) -> None:
    records = [{"prompt": "1>", "answer": 1}] * 300
    kept = [{p.id for p in stream(data(records, holdout=0.2, task__epochs=2, run__seed=s))} for s in (0, 1)]
    assert kept[0] == kept[1]
    assert 220 < len(kept[0]) < 260


def test_a_stream_without_a_prompt_ends_instead_of_searching_for_ever(data: Given) -> None:
    prompts = stream(data([{"prompt": "1>", "answer": 1}]))
    # As of a set that is too large to be looked at whole.
    prompts.limits = replace(prompts.limits, holdout=0.999)
    with pytest.raises(DataError, match=r"no prompt came of 2 records in a row; left out so far: {'held_out': 2}"):
        next(prompts)


@pytest.mark.parametrize("drawn", [0, 7, 60])
def test_a_restored_stream_goes_on_as_the_undisturbed_one(data: Given, drawn: int) -> None:
    given = {"a": ECHO, "b": [*ECHO[:5], {}]}
    options = {"weights": {"a": 3.0, "b": 1.0}, "on_bad_record": "skip"}
    whole, other = stream(data(given, **options)), stream(data(given, **options))
    for _ in range(drawn):
        next(whole)
    other.restore(json.loads(json.dumps(whole.state())))
    assert list(islice(whole, 40)) == list(islice(other, 40))


def test_nothing_is_read_beyond_the_check(data: Given) -> None:
    prompts = stream(data())
    read: list[int] = []
    records: Any = prompts.sets[0].records
    before = records.read
    records.read = lambda index: read.append(index) or before(index)  # type: ignore[func-returns-value]
    list(islice(prompts, 3))
    assert len(read) == 3
    assert check_prompts(prompts).records == 10


def test_examples_stand_before_every_prompt(data: Given, tmp_path: Path) -> None:
    few = [{"prompt": "1>", "answer": "1"}]
    for shots in (few, str(lines(tmp_path / "few.jsonl", few))):
        with pytest.raises(ConfigError, match=r"characters \['\\n'\]"):  # As text, which this tokenizer has not all of.
            data(few_shot=shots)
    with pytest.raises(ConfigError, match=r"data\.few_shot: none\.jsonl cannot be read"):
        data(few_shot="none.jsonl")
    with pytest.raises(ConfigError, match=r"data\.few_shot, entry 0 has no field 'answer'"):
        data(few_shot=[{"prompt": "1>"}])


def test_the_warm_up_takes_its_examples_from_the_first_records_of_the_order(data: Given) -> None:
    prepared = data(trainer__sft_warm_up_steps=2, trainer__sft_warm_up_batch=3)
    assert prepared.examples == [(p.text, p.answer) for p in islice(stream(prepared), 6)]
    with pytest.raises(ConfigError, match=r"data\.answer_column is null"):
        data(trainer__sft_warm_up_steps=2, answer_column=None)
