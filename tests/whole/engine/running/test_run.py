"""`asyncrl.run`: a run from Python, what it returns, raises and leaves behind."""

import asyncio
import json
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import anyio
import psutil
import pytest
import structlog
import torch

from asyncrl import BaseRolloutFilter, ConfigError, RunFailed, RunInterrupted, Summary, drop, keep, load_config, run
from asyncrl.collectors.tasks import Task
from asyncrl.engine.errors import AsyncRLError
from asyncrl.engine.events.types import StepEnded
from asyncrl.engine.records import Prompt
from asyncrl.engine.running.host import Host
from asyncrl.filters.base import FilterContext, GroupView
from asyncrl.filters.taggers import Tagger
from asyncrl.filters.verdict import Verdict

Small = Callable[..., Summary]


def events_of(directory: Path, kind: str) -> list[dict[str, Any]]:
    lines = (directory / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["type"] == kind]


def length_of(tokens: Sequence[int], /) -> int:
    return len(tokens)


class EvenOnly(BaseRolloutFilter):
    """Keeps every second group; given as an object, with a parameter that YAML could not write."""

    drop_reasons: ClassVar = ("odd",)
    taggers: ClassVar[dict[str, Tagger]] = {"my_length": length_of}
    requires: ClassVar = ("my_length",)

    def __init__(self, seen: list[int]) -> None:
        self._seen = seen

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        self._seen.append(group.group)
        assert group.tag("my_length") == group.lengths
        return keep() if group.group % 2 == 0 else drop("odd")


class Breaks(BaseRolloutFilter):
    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        raise KeyError("my own mistake")


class Digit(Task):
    """One prompt over and over; the first score hangs until a signal ends it."""

    hangs = True

    def prompts(self) -> Sequence[Prompt]:
        return [Prompt(0, "1>")]

    def score(self, prompt: Prompt, response: str) -> float:
        if Digit.hangs:
            Digit.hangs = False
            time.sleep(60)
        return float(len(response))


def called(call: Callable[[], Summary], *, notebook: bool) -> Summary:
    """Make a call, in a notebook's cell or in a plain script."""

    async def cell() -> Summary:
        return call()

    return asyncio.run(cell()) if notebook else call()


def test_a_run_returns_what_its_summary_file_holds(small: Small, tmp_path: Path) -> None:
    summary = small()
    assert (summary.exit_code, summary.exit_reason, summary.batches) == (0, "batch limit reached", 3)
    assert summary.steps > 0
    assert summary.directory == tmp_path / "out"
    assert summary.to_dict() == json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))
    assert sum(summary.trained_age_histogram.values()) == summary.ledger["trained"] > 0
    assert Summary.read(tmp_path / "out") == summary
    assert repr(summary).startswith(f"Summary(batch limit reached (exit 0) after {summary.steps} steps, 3 batches")


def test_times_count_from_the_call_not_from_the_start_of_the_process(small: Small) -> None:
    before = time.monotonic()
    summary = small()
    assert 0 < summary.seconds_total <= time.monotonic() - before + 0.01
    (started,) = events_of(summary.directory, "run_started")
    assert started["process_wall"] > psutil.Process().create_time()


def test_what_biases_a_run_is_said_before_it_starts_and_logged(small: Small) -> None:
    said: list[str] = []

    class Listens(Host):
        def tell(self, line: str) -> None:
            said.append(line)

    summary = small({"rollout.oversample": 2, "run.batches": 1}, host=Listens())
    assert any(line.startswith("warning: rollout.oversample is 2: of 6 answers the 4 that end first") for line in said)
    assert "rollout.oversample is 2" in (summary.directory / "log.jsonl").read_text(encoding="utf-8")


def test_nothing_is_printed(small: Small, capfd: pytest.CaptureFixture[str]) -> None:
    small()
    assert capfd.readouterr() == ("", "")


def test_a_filter_object_judges_after_the_configured_filters(small: Small) -> None:
    """Its tagger reaches the collector, and the log names it so that it can be found."""
    seen: list[int] = []
    chain = [{"name": "staleness"}, {"name": "dynamic_sampling", "on_exhausted": "train_partial"}]
    summary = small({"filters": chain}, filters=[EvenOnly(seen)])
    assert seen
    assert summary.ledger["dropped"]["EvenOnly/odd"] > 0
    (started,) = events_of(summary.directory, "run_started")
    names = [entry["name"] for entry in started["config"]["filters"]]
    assert names == ["staleness", f"{__name__}:EvenOnly", "dynamic_sampling"]
    assert list(summary.filters) == ["front_end", "staleness", "EvenOnly", "dynamic_sampling"]


@pytest.mark.parametrize(
    ("filters", "words"),
    [
        ([EvenOnly], "it is a class; give an object of it, EvenOnly"),
        (["my_filter:EvenOnly"], "give an object, or name it"),
        ([3], "must be an object of a subclass of BaseRolloutFilter"),
        ("staleness", "must be a list of filter objects"),
        (Breaks(), "must be a list of filter objects"),
        (None, "must be a list of filter objects"),
    ],
)
def test_what_is_no_filter_is_refused_at_once(small: Small, tmp_path: Path, filters: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        small(filters=filters)
    assert not (tmp_path / "out").exists()


def test_a_failure_is_raised_with_its_cause_and_how_far_the_run_came(small: Small) -> None:
    with pytest.raises(RunFailed, match=r"my own mistake.*log\.jsonl") as raised:
        small(filters=[Breaks()])
    failed = raised.value
    assert isinstance(failed, AsyncRLError)
    assert isinstance(failed.__cause__, KeyError)
    assert failed.summary.exit_code == 1
    assert (failed.summary.steps, failed.summary.data_plane_keys_left) == (0, 0)
    again = pickle.loads(pickle.dumps(failed))
    assert (str(again), again.summary) == (str(failed), failed.summary)


def test_a_file_that_cannot_be_written_is_named(small: Small, tmp_path: Path) -> None:
    (tmp_path / "out" / "summary.json").mkdir(parents=True)
    with pytest.raises(RunFailed) as raised:
        small()
    assert [str(lost) for lost in raised.value.lost] == [str(raised.value.__cause__)]
    assert "summary.json could not be written" in str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"rollout.max_stalenes": 3}, r"overrides: .*did you mean rollout\.max_staleness\?"),
        ({"rollout.max_staleness": -1}, r"rollout\.max_staleness \(from overrides\) is -1"),
        ({"task.name": "ech"}, "did you mean echo"),
        ({"run.directory": "elsewhere"}, r"run\.directory \(from overrides\) is 'elsewhere'.*leave run.directory out"),
    ],
)
def test_bad_input_is_an_error_before_a_folder_is_made(
    small: Small, tmp_path: Path, overrides: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        small(overrides)
    assert not (tmp_path / "out").exists()


def test_a_folder_holds_one_run(small: Small, tmp_path: Path) -> None:
    small()
    before = (tmp_path / "out" / "events.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"directory is '.*out', which holds a run already"):
        small()
    assert (tmp_path / "out" / "events.jsonl").read_bytes() == before


def test_a_configuration_may_be_made_before(small: Small, tmp_path: Path) -> None:
    """An object, with more on top; a file, by its path; and sections in place of paths."""
    file = tmp_path / "mine.yaml"
    file.write_text("run: {runtime: local, batches: 2}\nrollout: {groups_per_step: 2, group_size: 4}\nfilters: []\n")
    config = load_config(file, {"rollout": {"max_staleness": 0}})
    assert (config.run.batches, config.rollout.max_staleness) == (2, 0)
    assert run(config, tmp_path / "a").batches == 2
    assert run(config, tmp_path / "b", {"run.batches": 1}).batches == 1
    assert run(file, tmp_path / "c").batches == 2
    with pytest.raises(ConfigError, match=r"rollout\.group_size \(from overrides\) is 0"):
        run(config, tmp_path / "d", {"rollout.group_size": 0})
    with pytest.raises(TypeError, match="overrides has the key 3; keys are strings"):
        run(config, tmp_path / "d", {3: 4})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"config defalt is neither a file nor a preset .*did you mean default\?"):
        run("defalt", tmp_path / "d")


def test_progress_hears_of_each_step(small: Small) -> None:
    steps: list[StepEnded] = []
    summary = small(progress=steps.append)
    assert [event.step for event in steps] == list(range(1, summary.steps + 1))


def test_an_error_in_progress_fails_the_run_in_order(small: Small) -> None:
    def broken(step: StepEnded) -> None:
        raise ZeroDivisionError("my plot")

    with pytest.raises(RunFailed, match="my plot") as raised:
        small({"run.batches": 50}, progress=broken)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    summary = raised.value.summary
    assert 0 < summary.steps < 5
    assert [summary.ledger[place] for place in ("in_flight", "buffered", "claimed", "in_training")] == [0, 0, 0, 0]


def test_a_host_that_cannot_show_fails_the_run_in_order(small: Small) -> None:
    class Broken(Host):
        async def show(self) -> None:
            await anyio.sleep(0)
            raise OSError("no screen")

    with pytest.raises(RunFailed, match="no screen") as raised:
        small({"run.batches": 50}, host=Broken())
    assert raised.value.summary.data_plane_keys_left == 0


def test_a_run_under_an_event_loop_has_a_thread_of_its_own(small: Small) -> None:
    """As in a notebook, whose loop is as it was afterwards."""
    threads: list[threading.Thread] = []

    async def cell() -> Summary:
        summary = small(progress=lambda step: threads.append(threading.current_thread()))
        await asyncio.sleep(0)
        return summary

    assert asyncio.run(cell()).exit_code == 0
    assert threads
    assert all(thread is not threading.main_thread() for thread in threads)


def test_a_failure_under_an_event_loop_is_raised_there(small: Small) -> None:
    with pytest.raises(RunFailed, match="my own mistake"):
        called(lambda: small(filters=[Breaks()]), notebook=True)


@pytest.mark.parametrize("notebook", [False, True])
def test_a_score_that_hangs_is_ended(small: Small, monkeypatch: pytest.MonkeyPatch, notebook: bool) -> None:
    """Its alarm arrives in the main thread alone, which scores while a run has a thread of its own."""
    monkeypatch.setattr(Digit, "hangs", True)
    options = {"task.name": f"{__name__}:Digit", "collector.score_timeout_s": 0.2}

    began = time.monotonic()
    summary = called(lambda: small(options), notebook=notebook)
    assert time.monotonic() - began < 40
    assert summary.ledger["failed"] == {"score_timeout": 1}
    assert "main thread" not in (summary.directory / "log.jsonl").read_text(encoding="utf-8")


def test_a_run_in_another_thread_says_what_it_cannot_end(small: Small) -> None:
    summaries: list[Summary] = []
    thread = threading.Thread(target=lambda: summaries.append(small()))
    thread.start()
    thread.join()
    assert summaries[0].exit_code == 0
    assert "no score can be ended" in (summaries[0].directory / "log.jsonl").read_text(encoding="utf-8")


@pytest.mark.parametrize("notebook", [False, True])
def test_ctrl_c_finishes_the_step_and_raises(small: Small, notebook: bool) -> None:
    """It is a KeyboardInterrupt, so a script ends with it as by any other."""

    def interrupt(step: StepEnded) -> None:
        if step.step == 1:  # A second signal would not wait.
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as raised:
        called(lambda: small({"run.batches": 500}, progress=interrupt), notebook=notebook)
    assert isinstance(raised.value, RunInterrupted)
    summary = raised.value.summary
    assert (summary.exit_code, summary.exit_reason, summary.data_plane_keys_left) == (130, "interrupted", 0)
    assert summary.ledger["in_training"] == 0 < summary.steps


@pytest.mark.parametrize("notebook", [False, True])
def test_a_second_ctrl_c_does_not_wait_for_code_that_hangs(
    small: Small, monkeypatch: pytest.MonkeyPatch, notebook: bool
) -> None:
    monkeypatch.setattr(Digit, "hangs", True)
    options = {"task.name": f"{__name__}:Digit"}

    def press() -> None:
        while Digit.hangs:
            time.sleep(0.01)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)

    before = time.monotonic()
    threading.Thread(target=press).start()
    with pytest.raises(RunInterrupted) as raised:
        called(lambda: small(options), notebook=notebook)
    assert time.monotonic() - before < 20
    assert raised.value.summary.exit_code == 130
    assert not [thread for thread in threading.enumerate() if thread.name == "asyncrl-run"]


def test_two_runs_one_after_the_other_leave_nothing_behind(small: Small) -> None:
    """Not in torch, in signals, in structlog, in the environment, nor a thread; the second is like the first."""
    processors: list[Any] = [structlog.processors.KeyValueRenderer()]
    structlog.configure(processors=processors)
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(torch_threads + 1)
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)

    # What another test started may end meanwhile.
    others = set(threading.enumerate()) - {threading.main_thread()}

    def state() -> tuple[Any, ...]:
        return (
            {number: signal.getsignal(number) for number in signals},
            dict(os.environ),
            torch.get_num_threads(),
            structlog.get_config()["processors"] is processors,
            {thread for thread in threading.enumerate() if thread not in others},
            {path for path in Path("/tmp").iterdir() if path.name.startswith("asyncrl")},
        )

    try:
        small(directory="warm")  # What the first run imports may start threads of its own.
        before = state()
        first, second = small(directory="a"), small(directory="b")
        assert state() == before
        assert (first.ledger, first.reward_last_10) == (second.ledger, second.reward_last_10)
    finally:
        torch.set_num_threads(torch_threads)
        structlog.reset_defaults()


def test_one_run_at_a_time(small: Small) -> None:
    refused: list[BaseException] = []

    def another(step: StepEnded) -> None:
        with pytest.raises(RuntimeError, match="a run is under way") as raised:
            small(directory="beside")
        refused.append(raised.value)

    assert small(progress=another).exit_code == 0
    assert refused
