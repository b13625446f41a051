"""From YAML, options and `--set` to a checked configuration: order, sources, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from asyncrl.configs import Loaded, Override, RunConfig, flatten, load, parse_set, preset_names
from asyncrl.engine.errors import ConfigError


def settings(*texts: str) -> RunConfig:
    return load("default", [parse_set(text) for text in texts]).config


def refusal(*texts: str, config: str = "default") -> str:
    with pytest.raises(ConfigError) as caught:
        load(config, [parse_set(text) for text in texts])
    return str(caught.value)


def write(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


INTEGERS = [
    ("rollout.max_staleness", ["-1", "1.5", "two", "true", "null", "[2]"], "an integer of at least 0"),
    ("rollout.max_publish_lag", ["-1", "0.5"], "an integer of at least 0 or null"),
    ("rollout.groups_per_step", ["0", "-3", "1.0"], "an integer of at least 1"),
    ("rollout.group_size", ["0", "1"], "an integer of at least 2"),
    ("rollout.max_new_tokens", ["0"], "an integer of at least 1"),
    ("trainer.ranks", ["0", "-1"], "an integer of at least 1"),
    ("trainer.micro_batch_tokens", ["0", "-5"], "an integer of at least 1"),
    ("trainer.publish_tries", ["0"], "an integer of at least 1"),
    ("trainer.align", ["0", "-1", "1.5"], "an integer of at least 1"),
    ("trainer.sft_warm_up_steps", ["-1"], "an integer of at least 0"),
    ("task.epochs", ["0", "-1"], "an integer of at least 1 or null"),
    ("run.steps", ["0", "-1"], "an integer of at least 1 or null"),
    ("run.batches", ["0"], "an integer of at least 1 or null"),
    ("run.seed", ["-1"], "an integer of at least 0 and less than 4294967296"),
    ("collector.count", ["0"], "an integer of at least 1"),
]
NUMBERS = [
    ("rollout.temperature", ["0", "-1", ".nan", ".inf", "hot"], "a number greater than 0"),
    ("trainer.learning_rate", ["0", "-0.1", "1e-3x"], "a number greater than 0"),
    ("trainer.clip_low", ["0", "1", "1.5"], "a number greater than 0 and less than 1"),
    ("trainer.dual_clip", ["1", "0.5"], "a number greater than 1"),
    ("trainer.weight_decay", ["-0.1"], "a number of at least 0"),
    ("supervision.starve_timeout_s", ["0", "-1"], "a number greater than 0"),
    ("run.stop_at_reward", [".nan", "high"], "a number or null"),
]
WORDS = [
    ("run.runtime", ["cloud", "null", "1"], "one of ray, local"),
    ("trainer.over_budget", ["drop"], "one of mask, error"),
    ("collector.on_error", ["retry"], "one of skip, abort"),
    ("collector.device", ["gpu", "cuda:1", "0"], "one of auto, cpu, cuda"),
    ("trainer.device", ["gpu", "null"], "one of auto, cpu, cuda"),
    ("trainer.micro_batch_order", ["shortest_first"], "one of costliest_first, cheap_ends"),
    ("model.dtype", ["float16", "bf16"], "one of float32, bfloat16"),
    ("task.name", ["3"], "a string"),
    ("filters", ["3", "{}"], "a list"),
]


@pytest.mark.parametrize(
    ("path", "value", "allowed"),
    [(path, value, allowed) for path, values, allowed in INTEGERS + NUMBERS + WORDS for value in values],
)
def test_a_value_out_of_range_is_named_with_its_range(path: str, value: str, allowed: str) -> None:
    """J1: the message has the option as typed, the field, the value and what is allowed."""
    message = refusal(f"{path}={value}")
    assert message.startswith(f"--set {path}={value} ({path}) is ")
    assert message.endswith(f"; it must be {allowed}")


def test_every_wrong_value_is_told_at_once(tmp_path: Path) -> None:
    message = refusal("run.steps=0", config=write(tmp_path, "trainer: {ranks: 0}\nrollout: {group_size: 1}\n"))
    assert len(message.splitlines()) == 3
    assert f"trainer.ranks (from {tmp_path / 'mine.yaml'}) is 0" in message


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("rollout.max_stalenes=3", "section 'rollout' has no key 'max_stalenes'; did you mean rollout.max_staleness?"),
        ("max_staleness=3", "the configuration has no key 'max_staleness'; did you mean rollout.max_staleness?"),
        ("rolout.max_staleness=3", "the configuration has no key 'rolout'; did you mean rollout?"),
        ("a.b.c=1", "the configuration has no key 'a'; it has run, checkpoint,"),
        ("run.steps.x=1", "section 'run.steps' has no key 'x'"),
        ("trainer.max_staleness=3", "did you mean rollout.max_staleness?"),
        ("run=3", "run is a section; set one of its keys: seed, runtime,"),
        ("run.steps", "write it as section.key=value"),
        ("=3", "write it as section.key=value"),
        ("run.steps=[1", "the value is not YAML"),
    ],
)
def test_a_key_that_is_not_there_is_refused_with_a_suggestion(text: str, hint: str) -> None:
    """J3: misspelt, at another nesting level, an unknown path."""
    message = refusal(text)
    assert message.startswith(f"--set {text}")
    assert hint in message


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("rollout: {max_stalenes: 3}", "did you mean rollout.max_staleness?"),
        ("max_staleness: 3", "did you mean rollout.max_staleness?"),
        ("rollout: 3", "rollout is a section"),
        ("rollout:", "rollout is a section"),
        ("[1, 2]", "must hold sections"),
        ("", "must hold sections"),
        ("run: {steps: 3", "is not YAML"),
        ("run: {steps: 3, seed: 1, steps: 4}", "key 'steps' occurs twice"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_its_name(tmp_path: Path, text: str, hint: str) -> None:
    """J3, in files: no key is ignored, also not one that stands twice."""
    path = write(tmp_path, text)
    message = refusal(config=path)
    assert path in message
    assert hint in message


@pytest.mark.parametrize(
    ("name", "hint"),
    [("defalt", "did you mean default?"), ("no/such/file.yaml", "default, gsm8k-like, long_tail, rev")],
)
def test_a_preset_or_file_that_is_not_there_is_refused(name: str, hint: str) -> None:
    message = refusal(config=name)
    assert message.startswith(f"--config {name} is neither a file nor a preset")
    assert hint in message


@pytest.mark.parametrize(
    ("texts", "named"),
    [
        (["rollout.max_publish_lag=2", "rollout.max_staleness=1"], ["max_publish_lag is 2", "max_staleness 1"]),
        (["rollout.min_live=5", "rollout.group_size=4"], ["min_live is 5", "group_size 4"]),
        (["model.heads=3"], ["model.heads is 3", "model.hidden_size 64"]),
        (["trainer.micro_batch_tokens=2"], ["micro_batch_tokens is 2", "max_new_tokens 2"]),
        (["trainer.micro_batch_tokens=7", "trainer.align=4", "rollout.max_new_tokens=4"], ["is 7", "trainer.align 4"]),
        (["trainer.balance=false", "trainer.micro_batch_order=cheap_ends"], ["balance is false", "order cheap_ends"]),
        (["data_plane.capacity_rows=47"], ["capacity_rows is 47", "= 48"]),
        (["collector.decode_samples=15"], ["decode_samples is 15", "group_size 16"]),
        (["trainer.lr_total_steps=9"], ["lr_total_steps is 9", "lr_schedule constant"]),
        (["trainer.lr_schedule=cosine"], ["lr_schedule is cosine", "run.steps are null"]),
        (["trainer.lr_schedule=linear", "trainer.lr_total_steps=9", "run.steps=10"], ["is 9 and run.steps 10"]),
        (["trainer.lr_warm_up_steps=10", "run.steps=10"], ["lr_warm_up_steps is 10 and run.steps 10"]),
        (["trainer.decay_vectors=true"], ["decay_vectors is true", "weight_decay 0"]),
        (["rollout.oversample=241"], ["decode_samples is 256", "group_size 16", "oversample 241"]),
        (["filters=[{max_age: 1}]"], ["each entry needs a name", "max_age"]),
        (["filters=[{name: 3}]"], ["each entry needs a name"]),
    ],
)
def test_fields_that_contradict_each_other_are_named_with_both_values(texts: list[str], named: list[str]) -> None:
    message = refusal(*texts)
    assert all(words in message for words in named)


def test_an_entry_of_a_list_may_be_its_name_alone() -> None:
    texts = ("filters=[zero_std, dynamic_sampling]", "reward.functions=[exact_match]", "data.sets=[a.jsonl]")
    loaded = load("default", [parse_set(text) for text in texts], ["length"], rewards=["regex"]).config
    assert [entry["name"] for entry in loaded.filters] == ["zero_std", "length", "dynamic_sampling"]
    assert loaded.reward.functions == [{"name": "exact_match"}, {"name": "regex"}]
    assert [entry.path for entry in loaded.data.sets] == ["a.jsonl"]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("filters=[3]", "(filters.0) is 3; it must be a name alone, or a map, as in {name: zero_std}"),
        ("reward.functions=[[x]]", "as in {name: exact_match, weight: 2}"),
        ("data.sets=[2]", "it must be a path alone, or a map, as in {path: a.jsonl, weight: 2}"),
        ("data.few_shot=[{prompt: a, answer: 2}]", "entry 0 is {'prompt': 'a', 'answer': 2}; it must be a map of"),
        ("data.few_shot=3", "it must be a list of maps with `prompt` and `answer`, or a JSONL file"),
    ],
)
def test_an_entry_of_a_wrong_type_is_refused_with_what_to_write(text: str, hint: str) -> None:
    message = refusal(text)
    assert hint in message
    assert "\n" not in message


@pytest.mark.parametrize("path", ["data.path", "run.directory", "model.path"])
def test_an_empty_path_is_refused(path: str) -> None:
    """It would stand for the working folder."""
    assert f"({path}) is ''; it must be a string that is not empty or null" in refusal(f"{path}=''")


def test_what_just_fits_is_taken() -> None:
    settings("rollout.max_publish_lag=2", "rollout.max_staleness=2")
    settings("rollout.min_live=4", "rollout.group_size=4")
    settings("trainer.micro_batch_tokens=3")
    settings("trainer.micro_batch_tokens=8", "trainer.align=4", "rollout.max_new_tokens=7")
    settings("data_plane.capacity_rows=48")
    settings("collector.decode_samples=16")
    settings("rollout.oversample=240")
    settings("run.seed=4294967295", "rollout.max_staleness=0", "trainer.learning_rate=1", "run.stop_at_reward=-1.5")


@pytest.mark.parametrize(("staleness", "groups", "ahead"), [(0, 4, 4), (1, 4, 8), (2, 16, 48)])
def test_run_ahead_follows_from_the_bound(staleness: int, groups: int, ahead: int) -> None:
    """CASE-A11: never 0 groups in flight."""
    config = settings(f"rollout.max_staleness={staleness}", f"rollout.groups_per_step={groups}")
    assert config.run_ahead_groups == ahead


@pytest.mark.parametrize(("staleness", "lag", "used"), [(0, "null", 0), (1, "null", 1), (5, "null", 1), (5, "3", 3)])
def test_the_publish_lag_defaults_to_one_or_none(staleness: int, lag: str, used: int) -> None:
    config = settings(f"rollout.max_staleness={staleness}", f"rollout.max_publish_lag={lag}")
    assert config.max_publish_lag == used


def test_each_value_knows_where_it_came_from(tmp_path: Path) -> None:
    """Later layers win: default preset, then preset or file, then what was given, in order."""
    path = write(tmp_path, "run: {seed: 1, steps: 1, batches: 1}\n")
    overrides = [Override("run.seed", 2, "--seed"), Override("run.steps", 2, "--steps"), parse_set("run.steps=3")]
    loaded = load(path, overrides)
    run = loaded.config.run
    assert (run.seed, run.steps, run.batches, run.reward_window) == (2, 3, 1, 10)
    assert {key: loaded.sources[f"run.{key}"] for key in ("seed", "steps", "batches", "reward_window")} == {
        "seed": "--seed",
        "steps": "--set run.steps=3",
        "batches": path,
        "reward_window": "default",
    }
    assert set(loaded.sources) == set(flatten(loaded.config))


def test_a_part_of_the_tasks_options_is_the_source_of_them() -> None:
    loaded = load("default", [parse_set("task.options.size=3"), parse_set("task.options.deep.er=x")])
    assert loaded.config.task.options == {"size": 3, "deep": {"er": "x"}}
    assert loaded.sources["task.options"] == "--set task.options.deep.er=x"
    assert set(loaded.sources) == set(flatten(loaded.config))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E3", 1000.0),
        ("-2e+1", -20.0),
        ("2.5e-4", 2.5e-4),
        ("0.5", 0.5),
        ("1e3x", "1e3x"),
        ("e3", "e3"),
    ],
)
def test_numbers_are_read_as_people_write_them(text: str, value: Any) -> None:
    """YAML 1.1 would take 1e-3 for a string."""
    read = parse_set(f"trainer.learning_rate={text}").value
    assert (read, type(read)) == (value, type(value))


def names(loaded: Loaded) -> list[str]:
    return [entry["name"] for entry in loaded.config.filters]


def test_filters_are_appended_before_dynamic_sampling() -> None:
    assert names(load("default", filters=["a:A", "b:B"])) == ["staleness", "zero_std", "a:A", "b:B"]
    loaded = load("reverse", filters=["a:A"])
    assert names(loaded) == ["staleness", "zero_std", "a:A", "dynamic_sampling"]
    assert loaded.sources["filters"] == "reverse, --filter a:A"


def test_loading_twice_gives_fresh_values() -> None:
    load("reverse", [parse_set("task.options.x=1")], filters=["a:A"])
    assert names(load("reverse")) == ["staleness", "zero_std", "dynamic_sampling"]
    assert load("reverse").config.task.options == {}


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads(name: str) -> None:
    loaded = load(name)
    assert set(loaded.sources.values()) <= {"default", name}


@pytest.mark.parametrize(("written", "meant"), [("on", "on"), ("off", "off"), ('"off"', "off"), ("auto", "auto")])
def test_on_and_off_need_no_quotes_though_yaml_reads_them_as_booleans(written: str, meant: str) -> None:
    assert load("default", [parse_set(f"data.chat_template={written}")]).config.data.chat_template == meant


def test_the_presets_are_those_of_the_documentation() -> None:
    assert preset_names() == ["default", "gsm8k-like", "long_tail", "reverse", "sleepy", "smollm2"]
    default, reverse = load("default").config, load("reverse").config
    assert (default.task.name, default.run.batches, default.rollout.max_staleness) == ("echo", 240, 2)
    assert [entry["name"] for entry in default.filters] == ["staleness", "zero_std"]
    assert (default.trainer.ranks, default.run.runtime) == (2, "ray")
    assert reverse.task.name == "reverse"
    assert reverse.trainer.sft_warm_up_steps > 0
    assert reverse.filters[-1]["on_exhausted"] == "train_partial"
