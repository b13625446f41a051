"""A run that was stopped goes on: nothing is skipped, repeated or thrown away, and at bound 0 nothing differs."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import anyio
import pytest
import torch
from safetensors.torch import load_file

from asyncrl import BaseRolloutFilter, ConfigError, RunFailed, RunInterrupted, Summary, drop, keep, replay, run
from asyncrl.collectors.tasks import Task
from asyncrl.configs import Override, load
from asyncrl.engine.events.lock import LogLock
from asyncrl.engine.events.types import Acknowledged, Dispatched, Judged, Put, Resumed, RunStarted, StepEnded, encoded
from asyncrl.engine.records import Prompt
from asyncrl.engine.running.resume import Resumption, check_changes, resumed_config
from asyncrl.engine.trace.conservation import prove
from asyncrl.engine.trace.cutting import anonymised
from asyncrl.engine.trace.recording import Recording
from asyncrl.engine.trace.replay import replay as replay_recording
from asyncrl.engine.trace.validation import problems
from asyncrl.filters.base import FilterContext, GroupView
from asyncrl.filters.verdict import Verdict

PROMPTS = 24


class Sums(Task):
    """Rewards that differ within a group and depend on nothing but the text, so that every step changes the weights."""

    def prompts(self) -> Sequence[Prompt]:
        return [Prompt(i, f"{i}>", fields={"odd": {i % 2}}) for i in range(PROMPTS)]

    def score(self, prompt: Prompt, response: str) -> float:
        assert prompt.fields == {"odd": {int(prompt.id) % 2}}
        return (sum(map(ord, response)) + int(prompt.id)) % 7 / 7


class Hangs(Sums):
    """The score of prompt 3 never comes."""

    async def score(self, prompt: Prompt, response: str) -> float:  # type: ignore[override]
        if prompt.id == 3:
            await anyio.sleep_forever()
        return super().score(prompt, response)


class EveryThird(BaseRolloutFilter):
    """Drops by what it has seen so far, so that a count that is lost shows."""

    drop_reasons: ClassVar = ("third",)

    def __init__(self) -> None:
        self.seen = 0

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        self.seen += 1
        return drop("third") if self.seen % 3 == 0 else keep()

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Any) -> None:
        self.seen = state["seen"]


CONFIG: dict[str, Any] = {
    "run.runtime": "local",
    "run.batches": None,
    "run.save_model": True,
    "task.name": f"{__name__}:Sums",
    "task.epochs": 1,
    "rollout.groups_per_step": 2,
    "rollout.group_size": 4,
    "rollout.max_new_tokens": 3,
    "filters": [],
    "checkpoint.every_steps": 2,
}


def stopped_after(step: int) -> Callable[[StepEnded], None]:
    """Stop a run as `kill PID` does, at the end of a step."""

    def stop(event: StepEnded) -> None:
        if event.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return stop


def interrupted(directory: Path, overrides: dict[str, Any], *, after: int, **options: Any) -> Summary:
    with pytest.raises(RunInterrupted) as stopped:
        run("default", directory, {**CONFIG, **overrides}, progress=stopped_after(after), **options)
    assert stopped.value.summary.exit_code == 143
    return stopped.value.summary


def resumed(directory: Path, overrides: dict[str, Any] | None = None, **options: Any) -> Summary:
    return run(None, directory, overrides, resume=True, **options)


def judged_prompts(directory: Path) -> Counter[Any]:
    events = Recording.read(directory).events
    prompts = {event.group: event.prompt for event in events if isinstance(event, Dispatched)}
    return Counter(prompts[event.group] for event in events if isinstance(event, Judged))


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model" / "model.safetensors")


def assert_same_weights(one: Path, other: Path) -> None:
    before, after = weights(one), weights(other)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def assert_exact(directory: Path) -> None:
    """Each prompt was judged once, each sample has one fate, and a replay makes the same decisions."""
    assert judged_prompts(directory) == Counter(range(PROMPTS))
    recording = Recording.read(directory)
    assert prove(recording.events).faults() == []
    assert list(problems(directory)) == []
    assert recording.ended is not None
    assert recording.ended.keys_left == 0
    assert replay(directory).difference is None


def test_at_bound_0_a_resumed_run_ends_with_the_weights_of_an_undisturbed_one(tmp_path: Path) -> None:
    """Also from the checkpoint before the last, so that what was done after it is done again."""
    whole, parts, older = tmp_path / "whole", tmp_path / "parts", tmp_path / "older"
    bound = {"rollout.max_staleness": 0}
    undisturbed = run("default", whole, {**CONFIG, **bound})
    assert undisturbed.reward_first_10 != undisturbed.reward_last_10
    interrupted(parts, bound, after=5)
    assert sorted(path.name for path in (parts / "checkpoints").iterdir()) == ["v000004", "v000005"]
    shutil.copytree(parts, older)
    shutil.rmtree(older / "checkpoints" / "v000005")
    for directory in (parts, older):
        summary = resumed(directory)
        assert (summary.steps, summary.exit_reason) == (undisturbed.steps, undisturbed.exit_reason)
        assert summary.reward_last_10 == undisturbed.reward_last_10
        assert_same_weights(whole, directory)
        assert_exact(directory)


@pytest.mark.parametrize(
    ("rollout", "step"),
    [
        ({}, 3),
        ({}, 4),
        ({"rollout.stale_mode": "gate"}, 3),
        ({"rollout.pacing": True}, 4),
        ({"filters": [{"name": f"{__name__}:EveryThird"}, {"name": "dynamic_sampling", "on_exhausted": "wait"}]}, 3),
    ],
    ids=["oldest first", "oldest first, later", "gate", "pacing", "refill"],
)
def test_with_old_weights_each_prompt_is_judged_once_over_both_runs(
    rollout: dict[str, Any], step: int, tmp_path: Path
) -> None:
    """CASE-F1, CASE-F2: groups buffered, claimed, in a batch and in flight at the checkpoint."""
    interrupted(tmp_path, {"rollout.max_staleness": 2, **rollout}, after=step)
    state = json.loads((tmp_path / f"checkpoints/v{step:06d}/state.json").read_text())
    places = Counter(group["place"] for group in state["core"]["groups"])
    assert places["buffered"] + places["claimed"] > 0
    resumed(tmp_path)
    assert_exact(tmp_path)


def test_prompts_in_flight_at_the_checkpoint_are_issued_again(tmp_path: Path) -> None:
    """CASE-F1: the groups are lost, with a fate that says so, and the prompts are not."""
    interrupted(tmp_path, {"rollout.max_staleness": 2}, after=5)
    shutil.rmtree(tmp_path / "checkpoints/v000005")
    groups = json.loads((tmp_path / "checkpoints/v000004/state.json").read_text())["core"]["groups"]
    lost = [group["grant"]["group"] for group in groups if group["place"] == "in_flight"]
    assert lost
    summary = resumed(tmp_path)
    assert_exact(tmp_path)
    assert summary.ledger["dropped"] == {"not_restored": 4 * len(lost)}
    again = [event.retry_of for event in Recording.read(tmp_path).events if isinstance(event, Dispatched)]
    assert [group for group in again if group is not None] == lost


def test_a_checkpoint_at_the_end_of_an_epoch_is_no_exception(tmp_path: Path) -> None:
    """CASE-F1: two epochs, stopped as the first one ends; at bound 0 nothing is in flight then."""
    interrupted(tmp_path, {"rollout.max_staleness": 0, "task.epochs": 2}, after=PROMPTS // 2)
    resumed(tmp_path)
    assert judged_prompts(tmp_path) == Counter(dict.fromkeys(range(PROMPTS), 2))


def test_versions_ages_counts_and_limits_go_on_where_they_were(tmp_path: Path) -> None:
    """CASE-F4: V is 5, ages are counted from the versions that generated, and what was trained is gone."""
    interrupted(tmp_path, {"rollout.max_staleness": 2, "run.steps": 8, "task.epochs": None}, after=5)
    held = json.loads((tmp_path / "checkpoints/v000005/state.json").read_text())["core"]["groups"]
    summary = resumed(tmp_path)
    assert (summary.steps, summary.exit_reason) == (8, "step limit reached")
    events = Recording.read(tmp_path).events
    at = next(event.seq for event in events if isinstance(event, Resumed))
    served = [event.version for event in events if isinstance(event, Acknowledged) and event.seq > at]
    assert served == [5, 6, 7]
    stamps = {event.group: event.tags["version"] for event in events if isinstance(event, Put)}
    ages = {event.group: event.age for event in events if isinstance(event, Judged) and event.seq > at}
    kept = [group["grant"]["group"] for group in held if group["place"] == "buffered"]
    assert kept
    assert all(1 <= 5 - stamps[group] <= ages[group] <= 2 for group in kept)
    assert not ages.keys() & {event.group for event in events if isinstance(event, Judged) and event.seq < at}
    again = resumed(tmp_path)
    assert (again.steps, again.exit_reason) == (8, "step limit reached")


def test_a_prompt_that_hangs_does_so_within_its_limit_before_and_after(tmp_path: Path) -> None:
    """CASE-B4: its samples fail by `score_timeout_s`, the step goes on, and the resumed run is not held up by it again.

    CASE-B6: the last step's checkpoint is written, though nothing is generated behind it.
    """
    options = {"rollout.max_staleness": 1, "task.name": f"{__name__}:Hangs", "collector.score_timeout_s": 0.2}
    interrupted(tmp_path, options, after=4)
    summary = resumed(tmp_path)
    assert summary.exit_code == 0
    judged = judged_prompts(tmp_path)
    assert {prompt: count for prompt, count in judged.items() if prompt != 3} == {
        prompt: 1 for prompt in range(PROMPTS) if prompt != 3
    }
    recording = Recording.read(tmp_path)
    assert prove(recording.events).faults() == []
    assert recording.ended is not None
    assert recording.ended.keys_left == 0
    assert "score_timeout" in str(summary.ledger)
    assert (tmp_path / f"checkpoints/v{summary.steps:06d}/manifest.json").is_file()


def test_a_filter_goes_on_with_what_it_has_seen(tmp_path: Path) -> None:
    options: dict[str, Any] = {"rollout.max_staleness": 0}
    whole = run("default", tmp_path / "whole", {**CONFIG, **options}, filters=[EveryThird()])
    interrupted(tmp_path / "parts", options, after=4, filters=[EveryThird()])
    parts = resumed(tmp_path / "parts", filters=[EveryThird()])
    assert parts.ledger == whole.ledger
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")


def test_a_broken_checkpoint_is_named_and_the_one_before_stands_in_for_it(tmp_path: Path) -> None:
    """CASE-F6: bytes that are not those that were written are found before anything starts."""
    interrupted(tmp_path, {"rollout.max_staleness": 2}, after=5)
    rows = tmp_path / "checkpoints/v000005/groups/columns.safetensors"
    rows.write_bytes(rows.read_bytes()[:-1] + b"\x7f")
    resumed(tmp_path)
    assert_exact(tmp_path)
    warnings = [line for line in (tmp_path / "log.jsonl").read_text().splitlines() if "a checkpoint is broken" in line]
    assert len(warnings) == 1
    assert "columns.safetensors is not what was written" in warnings[0]
    assert (tmp_path / "checkpoints/v000005.broken").is_dir()


def test_without_a_whole_checkpoint_nothing_is_done(tmp_path: Path) -> None:
    interrupted(tmp_path, {"checkpoint.keep": 1}, after=3)
    state = tmp_path / "checkpoints/v000003/state.json"
    state.write_text(state.read_text()[:-1])
    before = (tmp_path / "events.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"none of its checkpoints is whole: .*state\.json has"):
        resumed(tmp_path)
    assert (tmp_path / "events.jsonl").read_bytes() == before


def breaks(*args: Any, **options: Any) -> Any:
    raise RuntimeError("it breaks")


@pytest.mark.parametrize(
    "where",
    [
        "asyncrl.engine.running.driver.torch_threads_restored",
        "asyncrl.engine.lifecycle.local.local_deployment",
        "asyncrl.engine.loop.saved.Saved.put_rows",
    ],
)
def test_a_run_that_fails_before_its_groups_are_back_leaves_none_without_a_fate(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `resumed` voided were their fates; the end of the log has others, and the next start finds the groups."""
    done = interrupted(tmp_path, {"rollout.max_staleness": 2, "checkpoint.at_end": False}, after=5)
    assert len(open_groups(tmp_path, "v000004")) > 1
    with monkeypatch.context() as broken:
        broken.setattr(where, breaks)
        with pytest.raises(RunFailed, match="it breaks") as failed:
            resumed(tmp_path)
    recording = Recording.read(tmp_path)
    assert recording.ended is not None
    assert prove(recording.events).faults() == []
    assert replay(tmp_path).difference is None
    assert failed.value.summary.steps == 4 < done.steps
    assert failed.value.summary.ledger["in_flight"] == failed.value.summary.ledger["buffered"] == 0
    resumed(tmp_path)
    assert_exact(tmp_path)


def open_groups(directory: Path, checkpoint: str) -> set[str]:
    """Return the places of the groups that a checkpoint has."""
    state = json.loads((directory / "checkpoints" / checkpoint / "state.json").read_text())
    return {group["place"] for group in state["core"]["groups"]}


def test_a_run_that_was_stopped_before_its_first_checkpoint_begins_anew(tmp_path: Path) -> None:
    interrupted(tmp_path, {"checkpoint.every_steps": None, "checkpoint.at_end": False}, after=3)
    assert not (tmp_path / "checkpoints").exists()
    resumed(tmp_path)
    assert_exact(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"run.seed": 1}, "run.seed: 0 -> 1"),
        ({"rollout.group_size": 8, "trainer.learning_rate": 0.5}, "rollout.group_size: 4 -> 8; trainer.learning_rate"),
        ({"filters": [{"name": "zero_std"}]}, "filters: "),
    ],
)
def test_what_would_change_what_is_learned_is_refused_with_both_values(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    interrupted(tmp_path, {}, after=1)
    with pytest.raises(ConfigError, match=says):
        resumed(tmp_path, change)


def test_limits_ranks_and_collectors_may_change_again_and_again(tmp_path: Path) -> None:
    """The log says from where on; a replay follows it."""
    interrupted(tmp_path, {"run.steps": 5}, after=3)
    assert resumed(tmp_path, {"run.steps": 6, "trainer.ranks": 3, "collector.count": 2}).steps == 6
    resumed(tmp_path, {"run.steps": None, "trainer.ranks": 1, "collector.count": 1})
    assert_exact(tmp_path)
    public = list(anonymised(Recording.read(tmp_path).events))
    assert __name__.encode() not in b"".join(map(encoded, public))
    assert replay_recording(Recording(public)).difference is None
    parts = [event.config for event in Recording.read(tmp_path).events if isinstance(event, Resumed)]
    assert [part["trainer"]["ranks"] for part in parts] == [3, 1]


def test_a_run_that_still_goes_on_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    lock = LogLock(tmp_path / "events.jsonl")
    with pytest.raises(ConfigError, match=f"is being written by process {os.getpid()}"):
        resumed(tmp_path)
    lock.release()


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no event log"):
        resumed(tmp_path)


def _whole_run(directory: Path, overrides: dict[str, Any]) -> None:
    """Run, or go on, in a process of its own; it ends without a word."""
    begun = (directory / "events.jsonl").exists()
    run(None if begun else "default", directory, None if begun else {**CONFIG, **overrides}, resume=begun)
    os._exit(0)


def kill_until_done(directory: Path, overrides: dict[str, Any], *, kills: int, seed: int) -> int:
    """Kill a run's process again and again, at random moments, and resume it; return how often it was killed."""
    chance, killed = random.Random(seed), 0
    processes = multiprocessing.get_context("fork")
    while True:
        process = processes.Process(target=_whole_run, args=(directory, overrides))
        process.start()
        log = directory / "events.jsonl"
        begun = log.stat().st_size if log.exists() else 0
        moment = begun + chance.randrange(2_000, 40_000)
        while process.is_alive() and (killed == kills or not log.exists() or log.stat().st_size < moment):
            time.sleep(0.002)
        if not process.is_alive():
            process.join()
            assert process.exitcode == 0
            return killed
        assert process.pid is not None
        time.sleep(chance.random() * 0.2)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        killed += 1


@pytest.mark.timeout(300)
@pytest.mark.parametrize("bound", [0, 2])
def test_a_run_that_is_killed_again_and_again_comes_to_its_end(bound: int, tmp_path: Path) -> None:
    """SIGKILL at random moments, resumed each time; at bound 0 the weights are those of an undisturbed run."""
    directory, overrides = tmp_path / "killed", {"rollout.max_staleness": bound}
    assert kill_until_done(directory, overrides, kills=5, seed=bound) >= 2
    assert_exact(directory)
    started = [event for event in Recording.read(directory).events if isinstance(event, RunStarted)]
    assert len(started) == 1
    if not bound:
        run("default", tmp_path / "whole", {**CONFIG, **overrides})
        assert_same_weights(tmp_path / "whole", directory)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_fifty_kills_at_random_moments_change_nothing(tmp_path: Path) -> None:
    """Ten runs at bound 0, each killed up to five times; each ends with the weights of an undisturbed run."""
    bound = {"rollout.max_staleness": 0}
    run("default", tmp_path / "whole", {**CONFIG, **bound})
    for seed in range(10):
        directory = tmp_path / f"killed-{seed}"
        kill_until_done(directory, bound, kills=5, seed=seed)
        assert_exact(directory)
        assert_same_weights(tmp_path / "whole", directory)


def test_options_of_an_environment_are_one_value_that_a_resumed_run_keeps(tmp_path: Path) -> None:
    """A key with a dot in it and an empty map stay what they are, and another key is another configuration."""
    options = {"a.b": 3, "empty": {}}
    recorded = load("default").config.model_dump()
    recorded["environment"] |= {"options": options}
    found = Resumption(tmp_path, 1, None, recorded)
    assert resumed_config(found, []).config.environment.options == options
    for changed in ({}, {**options, "hard": True}, {**options, "a.b": 4}):
        config = {**recorded, "environment": {**recorded["environment"], "options": changed}}
        with pytest.raises(ConfigError, match=r"environment\.options: .*a\.b.* -> "):
            check_changes(found, config, prompts=1)


PLACES: dict[str, Any] = {
    "exclude": ["secret/*"],
    "layout": "apart",
    "nodes": 2,
    "rank_gpus": 0.5,
    "collector_gpus": 0.5,
    "worker_cpus": 2.0,
    "max_collectors": 4,
    "place_timeout_s": 5.0,
}


def recorded_cluster(directory: Path, **values: Any) -> Resumption:
    given = [Override(f"cluster.{name}", value, "--set") for name, value in values.items()]
    return Resumption(directory, 1, None, load("default", given).config.model_dump())


def test_a_runs_folder_does_not_choose_the_cluster_that_is_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor the variables that go there. Its places are for a cluster that is joined: one of its own has none."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    found = recorded_cluster(tmp_path, address="10.0.0.1:6379", environment=["TOKEN"], **PLACES)
    assert resumed_config(found, []).config.cluster == load().config.cluster


def test_a_resumed_run_keeps_its_places_on_the_cluster_that_the_user_names(tmp_path: Path) -> None:
    found = recorded_cluster(tmp_path, address="10.0.0.1:6379", environment=["TOKEN"], **PLACES)
    cluster = resumed_config(found, [Override("cluster.address", "10.0.0.9:6379", "--ray-address")]).config.cluster
    expected = {"address": "10.0.0.9:6379", "environment": [], "time_slicing": None, **PLACES}
    assert cluster.model_dump() == expected, "who adds an option of a cluster decides whether a resumed run takes it"


def test_a_resumed_run_keeps_its_time_slicing(tmp_path: Path) -> None:
    found = recorded_cluster(tmp_path, time_slicing="keep")
    assert resumed_config(found, []).config.cluster.time_slicing == "keep"


def test_another_folder_for_a_run_that_goes_on_in_its_own_is_refused(tmp_path: Path) -> None:
    interrupted(tmp_path, {}, after=1)
    with pytest.raises(ConfigError, match=r"goes on in its own folder, and run\.directory .*elsewhere"):
        resumed(tmp_path, {"run.directory": str(tmp_path / "elsewhere")})
