"""`asyncrl simulate`: a table, a sweep, JSON, bad input."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from asyncrl.engine.cli import app
from asyncrl.engine.model import smollm2

SMALL = ("--set", "rollout.groups_per_step=2", "--set", "rollout.group_size=2", "--steps", "5")
TIMES = ("--group-seconds", "lognormal:1,0.5", "--step-seconds", "1")

# A data set whose prompts need the tokenizer of a model that is not there.
WITHOUT_MODEL = ("--set", "model.path=missing", "--set", "data.path=set.jsonl")


@pytest.fixture
def simulate(folder: Path) -> Callable[..., Result]:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["simulate", *SMALL, *arguments])

    return run


def test_a_sweep_prints_a_line_a_setting_and_the_waste_of_each(simulate: Callable[..., Result], folder: Path) -> None:
    result = simulate(*TIMES, "--sweep", "max_staleness=0,2", "--plot", "bars.txt")
    assert result.exit_code == 0, result.output
    head, zero, two, *waste = result.output.splitlines()
    assert head.split()[0] == "max_staleness"
    assert (zero.split()[:2], two.split()[0]) == (["0", "0"], "2")
    assert [line.partition(":")[0] for line in waste] == ["max_staleness 0", "max_staleness 2"]
    assert "mean age by max_staleness" in (folder / "bars.txt").read_text(encoding="utf-8")


def test_prompts_of_a_data_set_are_simulated(simulate: Callable[..., Result], folder: Path) -> None:
    (folder / "set.jsonl").write_text('{"prompt": "1>", "answer": 1}\n{"prompt": "2>", "answer": 2}', encoding="utf-8")
    result = simulate(*TIMES, "--set", "data.path=set.jsonl", "--set", "task.epochs=3", "--json")
    assert json.loads(result.output)["seed"][0]["steps"] == 3, result.output


def test_prompts_go_through_the_template_of_a_model_that_is_named_and_cached(
    simulate: Callable[..., Result], folder: Path, monkeypatch: pytest.MonkeyPatch, llama_checkpoint: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    smollm2.cached_folder().parent.mkdir(parents=True)
    (folder / "set.jsonl").write_text('{"prompt": "1", "answer": 1}', encoding="utf-8")
    arguments = (*TIMES, "--set", "model.path=smollm2", "--set", "data.path=set.jsonl", "--set", "task.epochs=3")
    refused = simulate(*arguments)
    assert (refused.exit_code, "is 'smollm2'" in refused.output) == (2, True), refused.output
    llama_checkpoint.rename(smollm2.cached_folder())
    assert simulate(*arguments).exit_code == 0


def test_one_seed_prints_the_same_twice(simulate: Callable[..., Result]) -> None:
    first, again, other = (simulate(*TIMES, "--json", "--seed", seed).output for seed in ("1", "1", "2"))
    assert first == again != other
    figures: dict[str, Any] = json.loads(first)["seed"][0]
    assert figures["steps"] == 5
    assert figures["value"] == 1


def test_numbers_of_generators_and_ranks_are_options(simulate: Callable[..., Result]) -> None:
    one, four = (
        json.loads(simulate(*TIMES, "--slots", "1", "--json", "--generators", n, "--ranks", "4").output)["seed"][0]
        for n in ("1", "4")
    )
    assert four["groups_per_second"] > 1.5 * one["groups_per_second"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "--group-seconds is required"),
        (("--group-seconds", "1"), "--step-seconds is required"),
        (("--group-seconds", "soon", "--step-seconds", "1"), "--group-seconds is 'soon'"),
        ((*TIMES, "--sweep", "max_stale=1"), "did you mean"),
        ((*TIMES, "--sweep", "max_staleness=-1"), "--sweep rollout.max_staleness=-1"),
        ((*TIMES, "--ranks", "0"), "--ranks 0"),
        (("--plot", "nowhere/bars.txt", *TIMES), "the folder nowhere does not exist"),
        ((*TIMES, *WITHOUT_MODEL), "model.path (from --set model.path=missing) is 'missing'"),
        (("--from", "nowhere"), "--from nowhere cannot be read as an event log"),
    ],
)
def test_bad_input_ends_with_code_2_and_the_option(
    simulate: Callable[..., Result], arguments: tuple[str, ...], says: str
) -> None:
    result = simulate(*arguments)
    assert result.exit_code == 2
    assert says in result.output


def test_a_recorded_run_and_given_durations_exclude_each_other(simulate: Callable[..., Result], folder: Path) -> None:
    from asyncrl.configs import load
    from asyncrl.engine.events.log import FILE_NAME, EventLog
    from asyncrl.engine.events.types import RunStarted

    log = EventLog(clock=lambda: 0.0, wall=lambda: 0.0, path=folder / FILE_NAME)
    log.append(RunStarted(schema=1, config=load("default").config.model_dump(), software={}))
    log.close()
    for told in (TIMES, ("--publish-seconds", "1"), ("--mixed-share", "0.5"), ("--failed-share", "0")):
        assert f"{told[0]} and --from exclude each other" in simulate(*told, "--from", ".").output
    refused = simulate("--from", ".")
    assert (refused.exit_code, "0 groups and 0 steps" in refused.output) == (2, True)


def test_a_log_of_which_parts_are_missing_teaches_nothing(simulate: Callable[..., Result], folder: Path) -> None:
    from asyncrl.engine.events.types import Dispatched, Put, RunStarted
    from asyncrl.engine.testing.trace import play, put
    from asyncrl.engine.trace.cutting import write_log

    events = play([put([0, 1]), put([0, 1])]).events
    for broken, says in (
        ([event for event in events if not isinstance(event, Dispatched)], "its dispatch is missing"),
        ([msgspec.structs.replace(e, tags={}) if isinstance(e, Put) else e for e in events], "'prompt_tokens' is miss"),
        ([event for event in events if not isinstance(event, RunStarted)], "has no run_started event"),
        ([], "holds no event"),
    ):
        numbered = [msgspec.structs.replace(event, seq=seq) for seq, event in enumerate(broken, start=1)]
        write_log(folder / "broken.jsonl", numbered)
        refused = simulate("--from", "broken.jsonl")
        assert (refused.exit_code, says in refused.output) == (2, True), refused.output
