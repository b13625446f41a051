"""`asyncrl train --runtime local` from a user's empty folder; the installed command itself where a test says so."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engine import metrics

COMMAND = Path(sys.executable).with_name("asyncrl")
Train = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def train(tmp_path: Path, warm_python: Train) -> Train:
    """Run the command in the user's folder; the run goes to `out`."""
    return partial(warm_python, tmp_path, "-m", "asyncrl", "train", "--runtime", "local", "--run-dir", "out")


@pytest.fixture
def installed_train(tmp_path: Path) -> Train:
    """Run the installed command in the user's folder; the run goes to `out`."""

    def run(*arguments: str, timeout_s: float = 100.0) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [COMMAND, "train", "--runtime", "local", "--run-dir", "out", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )

    return run


def summary_of(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "out" / "summary.json").read_text(encoding="utf-8"))
    return summary


def check_ledger(ledger: dict[str, Any]) -> None:
    """Conservation at the end: each dispatched sample has one fate, none is anywhere else."""
    assert [ledger[place] for place in ("in_flight", "buffered", "claimed", "in_training")] == [0, 0, 0, 0]
    ended = ledger["trained"] + sum(sum(ledger[kind].values()) for kind in ("masked", "dropped", "failed"))
    assert ledger["dispatched"] == ended > 0


def events_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "out" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["type"] == kind]


def write_task(folder: Path) -> None:
    """A task of the user's, with prompts, options and a reward in two parts."""
    (folder / "my_task.py").write_text(
        "from asyncrl.collectors.tasks import Reward, Task\n"
        "from asyncrl.engine.records import Prompt\n"
        "class MyTask(Task):\n"
        "    def __init__(self, letters='ab', broken=False):\n"
        "        self.letters, self.broken = letters, broken\n"
        "    def prompts(self):\n"
        "        return [Prompt(i, letter + '>', letter, 'mine') for i, letter in enumerate(self.letters)]\n"
        "    def score(self, prompt, response):\n"
        "        if self.broken:\n"
        "            raise ValueError('my judge is broken')\n"
        "        return Reward(len(response) + 0.1 * response.count('c'), {'length': float(len(response))})\n",
        encoding="utf-8",
    )


def test_thirty_batches_leave_a_whole_summary(installed_train: Train, tmp_path: Path) -> None:
    done = installed_train("--set", "run.batches=30")
    assert done.returncode == 0, done.stderr
    summary = summary_of(tmp_path)
    assert set(summary) >= {
        "steps",
        "seconds_total",
        "seconds_to_first_step",
        "reward_first_10",
        "reward_last_10",
        "reward_trained_last_10",
        "trained_age_histogram",
        "trained_age_max",
        "ledger",
        "data_plane_keys_left",
        "exit",
    }
    check_ledger(summary["ledger"])
    assert summary["exit"] == {"code": 0, "reason": "batch limit reached"}
    assert summary["data_plane_keys_left"] == 0
    assert len(events_of(tmp_path, "batch_judged")) == 30
    assert len(events_of(tmp_path, "step_ended")) == summary["steps"] > 0
    ages = {int(age): count for age, count in summary["trained_age_histogram"].items()}
    assert sum(ages.values()) == summary["ledger"]["trained"]
    assert max(ages) == summary["trained_age_max"] <= 2
    assert summary["trained_age_max"] > 0
    assert 0 < summary["seconds_to_first_step"] < summary["seconds_total"] < 100
    assert all(json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines())
    assert "trained ages (versions: samples)" in done.stdout


def test_without_staleness_every_age_is_zero(train: Train, tmp_path: Path) -> None:
    done = train("--max-staleness", "0", "--steps", "5", "--seed", "1")
    assert done.returncode == 0, done.stderr
    summary = summary_of(tmp_path)
    assert set(summary["trained_age_histogram"]) == {"0"}
    assert (summary["steps"], summary["exit"]["reason"]) == (5, "step limit reached")
    check_ledger(summary["ledger"])


def test_one_seed_makes_one_run(train: Train, installed_train: Train, tmp_path: Path) -> None:
    """The same keys, verdicts, plans and metrics, event by event, but for times; in two Pythons that hash otherwise."""
    logs = []
    for runs in (train, installed_train):
        assert runs("--set", "run.batches=12", "--seed", "3").returncode == 0
        lines = (tmp_path / "out" / "events.jsonl").read_text(encoding="utf-8").splitlines()
        events = [json.loads(line) for line in lines]
        for event in events:
            for name in ("t", "wall", "seconds", "rank_seconds", "predicted_seconds"):
                event.pop(name, None)
            if "claim" in event:  # The claimer's name is new each time, its count is not.
                event["claim"] = event["claim"].rpartition("/")[2]
            timed = [n for n in event.get("metrics", {}) if n.endswith("_s") or n in metrics.TIMED_FRACTIONS]
            for name in timed:
                del event["metrics"][name]
        logs.append(
            [e for e in events if e["type"] in ("put", "claimed", "judged", "planned", "step_ended", "settled")]
        )
        (tmp_path / "out").rename(tmp_path / f"out{len(logs)}")
    assert logs[0] == logs[1]
    assert any(event["type"] == "step_ended" for event in logs[0])


def test_a_filter_of_the_users_works_by_name(train: Train, tmp_path: Path) -> None:
    """From the user's folder, with the installed command; in the chain's order, with its own reason."""
    (tmp_path / "my_filter.py").write_text(
        "from asyncrl.filters import BaseRolloutFilter, drop, keep\n"
        "class ShortOnly(BaseRolloutFilter):\n"
        "    def judge(self, group, context):\n"
        "        return keep() if sum(group.lengths) < 32 else drop('long')\n",
        encoding="utf-8",
    )
    done = train("--set", "run.batches=10", "--set", "filters=[{name: staleness}]", "--filter", "my_filter:ShortOnly")
    assert done.returncode == 0, done.stderr
    summary = summary_of(tmp_path)
    (reason,) = (reason for reason in summary["ledger"]["dropped"] if reason.endswith("long"))
    assert summary["ledger"]["dropped"][reason] > 0
    assert summary["ledger"]["trained"] > 0
    by = {event["by"] for event in events_of(tmp_path, "judged") if event["dropped"] == reason}
    assert by == {"ShortOnly"}
    long = {e["group"] for e in events_of(tmp_path, "put") if sum(e["tags"]["response_tokens"]) >= 32}
    judged = events_of(tmp_path, "judged")
    assert all((event["group"] in long) == (event["dropped"] == reason) for event in judged)
    check_ledger(summary["ledger"])


def test_a_task_of_the_users_works_by_name(train: Train, tmp_path: Path) -> None:
    """Its options, dataset, prompts and the parts of its reward all arrive."""
    write_task(tmp_path)
    done = train(
        *("--set", "task.name=my_task:MyTask", "--set", "task.options.letters=def"),
        *("--set", "rollout.max_new_tokens=6", "--set", "run.batches=6", "--set", "task.epochs=60"),
    )
    assert done.returncode == 0, done.stderr
    puts = events_of(tmp_path, "put")
    assert {event["tags"]["dataset"] for event in puts} == {"mine"}
    assert {event["tags"]["prompt"] for event in puts} == {0, 1, 2}
    for event in puts:
        assert all(
            int(reward) == length
            for reward, length in zip(event["tags"]["reward"], event["tags"]["length"], strict=True)
        )
    summary = summary_of(tmp_path)
    assert summary["steps"] > 0
    check_ledger(summary["ledger"])


def test_a_value_that_is_set_is_the_value_in_force(train: Train, tmp_path: Path) -> None:
    done = train(
        "--set",
        "rollout.group_size=4",
        "--set",
        "rollout.groups_per_step=3",
        "--set",
        "run.batches=4",
        "--set",
        "filters=[]",
        "--max-staleness",
        "1",
        "--seed",
        "9",
    )
    assert done.returncode == 0, done.stderr
    (started,) = events_of(tmp_path, "run_started")
    config = started["config"]
    assert (config["rollout"]["group_size"], config["rollout"]["groups_per_step"]) == (4, 3)
    assert (config["rollout"]["max_staleness"], config["run"]["seed"], config["filters"]) == (1, 9, [])
    assert all(event["size"] == 4 for event in events_of(tmp_path, "dispatched"))
    assert all(event["judged"] == 3 for event in events_of(tmp_path, "batch_judged"))
    assert "max_staleness 1, run-ahead 6 groups, max_publish_lag 1, seed 9" in done.stdout


def test_a_filter_that_raises_ends_the_run_with_its_name_and_traceback(train: Train, tmp_path: Path) -> None:
    """Exit code 1; the ledger still adds up, and no key is left."""
    (tmp_path / "my_filter.py").write_text(
        "from asyncrl.filters import BaseRolloutFilter, keep\n"
        "class Breaks(BaseRolloutFilter):\n"
        "    def judge(self, group, context):\n"
        "        if context.step > 1 or group.group > 20:\n"
        "            raise KeyError('my own mistake')\n"
        "        return keep()\n",
        encoding="utf-8",
    )
    done = train("--filter", "my_filter:Breaks")
    assert done.returncode == 1
    for words in ("Breaks", "my own mistake", "my_filter.py", "Traceback", "log.jsonl"):
        assert words in done.stderr
    summary = summary_of(tmp_path)
    assert summary["exit"]["code"] == 1
    assert "KeyError" in summary["exit"]["reason"]
    assert summary["data_plane_keys_left"] == 0
    check_ledger(summary["ledger"])


def test_a_judge_that_never_works_ends_the_run(train: Train, tmp_path: Path) -> None:
    """C6: when all samples of all groups fail, the error is surfaced; it is not an endless run."""
    write_task(tmp_path)
    done = train("--set", "task.name=my_task:MyTask", "--set", "task.options.broken=true", "--set", "run.batches=5")
    assert done.returncode == 1
    assert "my judge is broken" in done.stderr + (tmp_path / "out" / "log.jsonl").read_text(encoding="utf-8")
    summary = summary_of(tmp_path)
    assert summary["steps"] == 0
    assert summary["ledger"]["failed"]["score_error"] > 0
    check_ledger(summary["ledger"])


def test_a_run_that_trains_nothing_is_no_success(train: Train, tmp_path: Path) -> None:
    """J2: a batch without survivors is not a step; exit code 1, never `complete` with 0 steps."""
    chain = "filters=[{name: dynamic_sampling, low: 2.0, max_attempts: 1, on_exhausted: train_partial}]"
    done = train("--set", "run.batches=2", "--set", chain)
    assert done.returncode == 1
    summary = summary_of(tmp_path)
    assert summary["steps"] == 0
    assert "no step was trained" in summary["exit"]["reason"]
    check_ledger(summary["ledger"])


def test_a_run_whose_prompts_are_all_over_the_budget_says_so_and_ends(train: Train, tmp_path: Path) -> None:
    """FOUND-L5: 46 of 48 samples masked, no limit of batches, and not a word; it went on for ever."""
    (tmp_path / "long.py").write_text(
        "from asyncrl.collectors.tasks import Task\n"
        "from asyncrl.engine.records import Prompt\n"
        "class Long(Task):\n"
        "    def prompts(self):\n"
        "        return [Prompt(id=i, text=f'{i}12345678>') for i in range(4)]\n"
        "    def score(self, prompt, response):\n"
        "        return float(len(response))\n",
        encoding="utf-8",
    )
    small = ("rollout.groups_per_step=2", "rollout.group_size=4", "trainer.micro_batch_tokens=8", "filters=[]")
    options = ("task.name=long:Long", "run.batches=null", "run.max_empty_batches=12", *small)
    done = train(*(word for option in options for word in ("--set", option)))
    assert done.returncode == 1
    assert "12 batches in a row had nothing to train" in done.stderr
    assert "raise trainer.micro_batch_tokens (now 8)" in done.stdout
    log = (tmp_path / "out" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    assert [line["alarm"] for line in map(json.loads, log) if "alarm" in line] == ["over_budget", "empty_batches"]
    alarms = summary_of(tmp_path)["alarms"]
    assert [(alarm["name"], alarm["first_batch"], alarm["last_batch"]) for alarm in alarms] == [
        ("over_budget", 10, 12),
        ("empty_batches", 10, 12),
    ]


def test_bad_input_is_code_2_and_makes_no_folder(train: Train, tmp_path: Path) -> None:
    done = train("--set", "rollout.max_stalenes=3")
    assert done.returncode == 2
    assert "did you mean rollout.max_staleness?" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_data_may_end_before_the_limit(train: Train, tmp_path: Path) -> None:
    """CASE-B2: ten prompts, one epoch, four groups a step: all of them are judged, and the end has its name."""
    done = train("--set", "task.epochs=1", "--set", "rollout.groups_per_step=4", "--set", "filters=[]")
    assert done.returncode == 0, done.stderr
    summary = summary_of(tmp_path)
    assert summary["exit"]["reason"] == "data exhausted"
    assert sorted(event["prompt"] for event in events_of(tmp_path, "dispatched")) == list(range(10))
    assert sum(event["judged"] for event in events_of(tmp_path, "batch_judged")) == 10
    check_ledger(summary["ledger"])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("slicing", ["null", pytest.param("keep", marks=pytest.mark.long)])
def test_the_default_task_is_learnt(train: Train, tmp_path: Path, slicing: str) -> None:
    """From under 0.1 to 0.9, with stale samples among those trained; the run ends when it has learnt.

    Also where trainer and generator have the device in turns.
    """
    done = train("--set", "run.stop_at_reward=0.9", "--set", f"cluster.time_slicing={slicing}")
    assert done.returncode == 0, done.stderr
    summary = summary_of(tmp_path)
    assert summary["exit"]["reason"] == "reward reached"
    assert summary["reward_first_10"] < 0.1
    assert summary["reward_last_10"] >= 0.9
    assert 0 < summary["trained_age_max"] <= 2
    check_ledger(summary["ledger"])


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("staleness", ["0", "2"])
@pytest.mark.parametrize("seed", ["0", "1", "2", "3", "4"])
def test_every_seed_learns_the_default_task(train: Train, tmp_path: Path, seed: str, staleness: str) -> None:
    """Each takes under 20 s on a quiet machine."""
    done = train("--seed", seed, "--max-staleness", staleness, timeout_s=280)
    assert done.returncode == 0, done.stderr
    summary = summary_of(tmp_path)
    assert summary["reward_first_10"] < 0.1
    assert summary["reward_last_10"] >= 0.9
    assert summary["trained_age_max"] <= int(staleness)
    check_ledger(summary["ledger"])


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_reverse_preset_learns(train: Train, tmp_path: Path) -> None:
    done = train("--config", "reverse", timeout_s=580)
    assert done.returncode == 0, done.stderr
    summary = summary_of(tmp_path)
    assert summary["reward_last_10"] >= 0.9 > summary["reward_first_10"]
    assert summary["ledger"]["dropped"]["zero_std"] > 0
    check_ledger(summary["ledger"])
