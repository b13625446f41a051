"""The options of `train` and `config`: sources of values, and refusals with exit code 2."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from asyncrl.configs import flatten, load

Command = Callable[..., Result]


def values(result: Result) -> dict[str, tuple[str, str]]:
    """Return path to (value, source) of what `config` prints."""
    assert result.exit_code == 0, result.output
    split = (line.partition(" = ") for line in result.stdout.splitlines())
    return {path.strip(): (rest.rpartition("  # ")[0], rest.rpartition("  # ")[2]) for path, _, rest in split}


def test_config_prints_every_value_with_its_source(command: Command) -> None:
    found = values(command("config"))
    assert set(found) == set(flatten(load("default").config))
    assert found["rollout.max_staleness"] == ("2", "default")
    assert found["run.directory"] == ("null", "default")
    assert found["task.name"] == ('"echo"', "default")


def test_presets_files_and_sets_are_told_apart(command: Command, folder: Path) -> None:
    (folder / "mine.yaml").write_text("rollout: {max_staleness: 5}\nrun: {seed: 3}\n", encoding="utf-8")
    found = values(command("config", "--config", "mine.yaml", "--set", "run.seed=4", "--filter", "user_filters:Fine"))
    assert found["rollout.max_staleness"] == ("5", "mine.yaml")
    assert found["run.seed"] == ("4", "--set run.seed=4")
    assert found["run.batches"] == ("240", "default")
    assert '"user_filters:Fine"' in found["filters"][0]
    assert found["filters"][1] == "default, --filter user_filters:Fine"
    assert values(command("config", "--config", "reverse"))["task.name"] == ('"reverse"', "reverse")


def test_each_option_of_train_sets_its_value(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    # A model of the Hub that is not there: a dry run would refuse it offline, and asks nobody otherwise.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    options = {
        "--max-staleness": ("0", "rollout.max_staleness", "0"),
        "--steps": ("7", "run.steps", "7"),
        "--seed": ("8", "run.seed", "8"),
        "--run-dir": ("there", "run.directory", '"there"'),
        "--model": ("owner/123", "model.path", '"owner/123"'),
        "--runtime": ("local", "run.runtime", '"local"'),
    }
    arguments = [text for option, (value, _, _) in options.items() for text in (option, value)]
    found = values(command("train", "--dry-run", *arguments))
    for option, (_, path, shown) in options.items():
        assert found[path] == (shown, option)


def test_an_option_wins_over_the_file_and_set_over_the_option(command: Command, folder: Path) -> None:
    (folder / "mine.yaml").write_text("run: {seed: 3, steps: 3}\n", encoding="utf-8")
    file = ("--config", "mine.yaml")
    found = values(command("train", "--dry-run", *file, "--seed", "4", "--steps", "4", "--set", "run.steps=5"))
    assert found["run.seed"] == ("4", "--seed")
    assert found["run.steps"] == ("5", "--set run.steps=5")


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("--max-staleness", "-1", "an integer of at least 0"),
        ("--max-staleness", "1.5", "an integer of at least 0"),
        ("--max-staleness", "two", "an integer of at least 0"),
        ("--steps", "0", "an integer of at least 1"),
        ("--steps", "many", "an integer of at least 1"),
        ("--seed", "-1", "an integer of at least 0"),
        ("--runtime", "cloud", "local"),
    ],
)
def test_a_bad_option_is_named_with_value_and_range(command: Command, option: str, value: str, allowed: str) -> None:
    """J1: exit code 2, before anything starts."""
    result = command("train", option, value)
    assert result.exit_code == 2
    assert all(words in result.stderr for words in (option, value, allowed))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module_here:X", "cannot import no_such_module_here"),
        ("user_broken:X", "importing user_broken raised RuntimeError('at import')"),
        ("user_filters:Fines", "user_filters has no Fines; did you mean Fine?"),
        ("user_filters:NoFilter", "not a subclass of BaseRolloutFilter"),
        ("user_filters:NoJudge", "judge"),
        ("user_filters", "unknown"),
        ("zero_sdt", "did you mean zero_std?"),
        ("user_filters:", "module:Class"),
        (":Fine", "module:Class"),
    ],
)
def test_a_bad_filter_is_refused_by_name(command: Command, name: str, message: str) -> None:
    result = command("train", "--filter", name)
    assert result.exit_code == 2
    assert (
        f"filter {name}" in result.stderr
        or f"filter {name!r}" in result.stderr
        or f"filter is {name!r}" in result.stderr
    )
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_filter_whose_state_is_not_json_is_refused_by_a_dry_run(command: Command) -> None:
    """FOUND-C15: not after the whole run."""
    result = command("train", "--dry-run", "--filter", "user_filters:Sets")
    assert result.exit_code == 2
    assert "filter Sets: state_dict must return plain JSON values" in result.stderr


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{name: user_filters:Fine, longst: 3}", "no parameter 'longst'; did you mean longest?"),
        ("{name: user_filters:Fine, longest: 0}", "longest is 0; it must be at least 1"),
        ("{name: zero_std, max_age: 1}", "no parameter 'max_age'"),
        ("{name: staleness, max_age: -1}", "max_age is -1"),
        ("{name: dynamic_sampling, max_attempts: -1}", "max_attempts is -1; it must be an integer of at least 1"),
        ("{name: dynamic_sampling, on_exhausted: stop}", "on_exhausted is 'stop'"),
    ],
)
def test_a_filters_parameters_are_checked_before_the_run(command: Command, entry: str, message: str) -> None:
    result = command("train", "--set", f"filters=[{entry}]")
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["task.name=ecko"], "task.name is 'ecko'; did you mean echo?"),
        (["task.name=no_such_module_here:T"], "task.name no_such_module_here:T: cannot import"),
        (["task.name=user_filters:Fine"], "not a subclass of Task"),
        (["task.options={size: 3}"], "task.options {'size': 3}"),
        (["model.path=no/such/folder"], "model.path (from --set model.path=no/such/folder) is 'no/such/folder'"),
        (["model.path=."], "config.json"),
    ],
)
def test_a_bad_task_or_checkpoint_is_refused(command: Command, texts: list[str], message: str) -> None:
    result = command("train", *[part for text in texts for part in ("--set", text)])
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_folder_that_holds_a_run_is_refused(command: Command, folder: Path) -> None:
    (folder / "old").mkdir()
    (folder / "old" / "events.jsonl").write_text("{}\n", encoding="utf-8")
    for dry in ((), ("--dry-run",)):
        result = command("train", *dry, "--run-dir", "old")
        assert result.exit_code == 2
        assert "--run-dir is 'old', which holds a run already" in result.stderr


def test_a_folder_that_cannot_be_made_is_refused(command: Command, folder: Path) -> None:
    (folder / "taken").write_text("", encoding="utf-8")
    for name in ("taken", "taken/below", "/proc/nowhere"):
        for dry in ((), ("--dry-run",)):
            result = command("train", *dry, "--run-dir", name)
            assert result.exit_code == 2
            assert f"--run-dir: cannot make the folder {name}" in result.stderr
    assert command("train", "--dry-run", "--run-dir", "new/below").exit_code == 0


def test_an_unknown_option_or_command_is_code_2(command: Command) -> None:
    assert command("train", "--max-stalenes", "2").exit_code == 2
    assert command("trian").exit_code == 2


def test_a_shared_memory_directory_that_cannot_be_written_to_is_refused(command: Command, folder: Path) -> None:
    for bad in ("nowhere", "user_filters.py"):
        result = command("train", "--set", f"data_plane.shared_memory={bad}")
        assert result.exit_code == 2
        assert all(words in result.stderr for words in ("data_plane.shared_memory", bad, "auto, or null"))
    for good in ("auto", "null", str(folder)):
        assert command("train", "--dry-run", "--set", f"data_plane.shared_memory={good}").exit_code == 0


@pytest.mark.parametrize("path", ["trainer.device", "collector.device"])
def test_a_gpu_that_is_not_there_is_refused_before_anything_starts(command: Command, path: str) -> None:
    import torch

    if torch.cuda.device_count():
        pytest.skip("there is a GPU here")
    done = command("train", "--set", f"{path}=cuda")
    assert done.exit_code == 2
    assert (
        f"{path} (from --set {path}=cuda) is 'cuda' and torch sees no GPU here; it must be auto or cpu" in done.output
    )


def test_config_explains_a_key_and_refuses_an_unknown_one(command: Command) -> None:
    result = command("config", "--explain", "rollout.max_staleness")
    assert result.exit_code == 0
    assert "rollout.max_staleness: an integer of at least 0; default 2" in result.output
    assert "0 is synchronous training" in result.output
    unknown = command("config", "--explain", "max_stalenes")
    assert unknown.exit_code == 2
    assert "did you mean max_staleness?" in unknown.output
    assert "--explain seed" in command("config", "seed").output


def test_mode_tokens_is_refused_with_a_generator_that_makes_no_spans(command: Command) -> None:
    """FOUND-I9: it would do what `drop` does, and say otherwise."""
    result = command("train", "--dry-run", "--set", "rollout.stale_mode=tokens", "--set", "collector.engine=batch")
    assert result.exit_code == 2
    assert "rollout.stale_mode (from --set rollout.stale_mode=tokens) is 'tokens'" in result.stderr
    assert "drop or gate" in result.stderr
    assert command("train", "--dry-run", "--set", "rollout.stale_mode=tokens").exit_code == 0


@pytest.mark.parametrize(("name", "value", "off"), [("oversample", "2", "0"), ("stale_mode", "tokens", "drop")])
def test_what_has_no_place_in_synchronous_training_is_refused(
    command: Command, name: str, value: str, off: str
) -> None:
    given = ("train", "--dry-run", "--set", f"rollout.{name}={value}")
    result = command(*given, "--max-staleness", "0")
    assert result.exit_code == 2
    assert f"rollout.{name} (from --set rollout.{name}={value}) is" in result.stderr
    assert "rollout.max_staleness 0 (from --max-staleness)" in result.stderr
    assert f"It must be {off} (--set rollout.{name}={off}), or max_staleness at least 1" in result.stderr
    assert command(*given, "--max-staleness", "1").exit_code == 0


@pytest.mark.parametrize(
    "given",
    ["rollout.top_p=0.9", "rollout.stop_strings=[x]", "collector.on_update=continue"],
)
def test_what_the_engine_batch_would_ignore_is_refused(command: Command, given: str) -> None:
    """CASE-G4: a way to sample that an engine has not got is refused, and never left out."""
    result = command("train", "--dry-run", "--set", "collector.engine=batch", "--set", given)
    assert result.exit_code == 2
    assert f"{given.partition('=')[0]} (from --set {given})" in result.stderr
    assert "collector.engine is 'batch'" in result.stderr
    assert command("train", "--dry-run", "--set", given).exit_code == 0


@pytest.mark.parametrize(("name", "value"), [("cancel_stale", "true"), ("requeue_tries", "2")])
def test_what_contradicts_mode_tokens_is_refused_in_a_simulation_too(command: Command, name: str, value: str) -> None:
    """FOUND-I9: an option that would harm, and one that would do nothing."""
    both = ("--set", "rollout.stale_mode=tokens", "--set", f"rollout.{name}={value}")
    seconds = ("--group-seconds", "1", "--step-seconds", "1")
    for arguments in (("train", "--dry-run"), ("simulate", *seconds)):
        result = command(*arguments, *both)
        assert result.exit_code == 2
        assert f"rollout.{name} (from --set rollout.{name}={value}) is" in result.stderr
        assert "rollout.stale_mode 'tokens'" in result.stderr


@pytest.mark.parametrize("text", ["seed: {{ seed }}", "run:\n  seed: " + "[" * 400])
def test_yaml_that_cannot_be_read_is_refused_with_its_place(command: Command, folder: Path, text: str) -> None:
    """FOUND-I7: a template that was not filled in, and one that is too deep, wherever YAML is read."""
    (folder / "mine.yaml").write_text(text, encoding="utf-8")
    value = text.partition(": ")[2]
    for given in (("--config", "mine.yaml"), ("--set", f"task.options.x={value}"), ("--seed", value)):
        result = command("train", "--dry-run", *given)
        assert result.exit_code == 2
        assert given[0] in result.stderr
        assert re.search(r"line \d+, column \d+: ", result.stderr)
    assert "mine.yaml" in command("train", "--config", "mine.yaml").stderr


def test_a_working_folder_that_was_deleted_is_a_line(command: Command, folder: Path) -> None:
    """FOUND-I16: for every command."""
    for arguments in (("train", "--dry-run"), ("config",), ("filters",), ("doctor",)):
        gone = folder / "gone"
        gone.mkdir()
        os.chdir(gone)
        gone.rmdir()
        try:
            result = command(*arguments)
        finally:
            os.chdir(folder)
        assert (result.exit_code, "the working folder cannot be used" in result.stderr) == (2, True), result.output


def test_a_slot_that_the_longest_prompt_does_not_fit_into_is_refused(command: Command) -> None:
    found = command("train", "--runtime", "local", "--dry-run", "--set", "collector.slot_tokens=3")
    assert found.exit_code == 2
    assert "collector.slot_tokens (from --set collector.slot_tokens=3) is 3, and the longest prompt" in found.output
    assert "it must be null, or at least 4" in found.output


def test_generate_without_a_prompt_on_standard_input_says_so(command: Command) -> None:
    found = command("generate", ".", "-")
    assert found.exit_code == 2
    assert "standard input has no prompt" in found.output


def test_a_reward_that_reads_a_field_that_no_record_has_is_refused(command: Command, folder: Path) -> None:
    (folder / "train.jsonl").write_text('{"prompt": "1>", "answer": "1"}\n', encoding="utf-8")
    reward = "reward.functions=[{name: exact_match, field: tests}]"
    found = command("train", "--runtime", "local", "--dry-run", "--data", "train.jsonl", "--set", reward)
    assert found.exit_code == 2
    assert (
        "reward exact_match cannot score what it will be given: prompt 'train:1' has no field 'tests'" in found.output
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("generate", "run", "7>", "--samples", "0"), ("--samples", "it is 0; it must be an integer of at least 1")),
        (("generate", "run", "7>", "--temperature", "hot"), ("--temperature", "it is hot; it must be a number of")),
        (("generate", "run", "7>", "--seed", "1.5"), ("--seed", "it is 1.5; it must be an integer of at least 0")),
        (("simulate", "--failed-share", "2"), ("--failed-share", "it is 2; it must be a number from 0 to 1")),
        (("simulate", "--mixed-share", "nan"), ("--mixed-share", "it is nan; it must be a number from 0 to 1")),
        (("replay", "run", "--step", "x", "--out", "y"), ("--step", "it is x; it must be an integer of at least 0")),
        (("plan", "show", "run", "--step", "-1"), ("--step", "it is -1; it must be an integer of at least 0")),
        (("trace", "slice", "run", "--out", "x", "--from", "-1"), ("--from", "it is -1; it must be an integer")),
    ],
)
def test_a_number_that_an_option_cannot_take_is_named_with_its_range(
    command: Command, arguments: tuple[str, ...], named: tuple[str, ...]
) -> None:
    result = command(*arguments)
    assert result.exit_code == 2
    said = " ".join(result.stderr.replace("│", " ").split())
    assert all(words in said for words in named), said
