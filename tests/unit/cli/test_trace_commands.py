"""`asyncrl replay`, `ledger` and `trace`: what they print, and their exit codes."""

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from asyncrl.engine.cli import app
from asyncrl.engine.events.log import read_events
from asyncrl.engine.events.types import AnyEvent, Dispatched, Put, Settled
from asyncrl.engine.testing.trace import Played, fail, hang, play, put, version
from asyncrl.engine.trace.cutting import write_log

SCRIPT = [put([0, 1]), put([1, 1]), fail(), version(6), put([0, 1], version=4), put([0, 1], version=2), hang()]


@pytest.fixture(scope="module")
def played() -> Played:
    return play(SCRIPT)


@pytest.fixture
def run(played: Played, tmp_path: Path) -> Path:
    """A run's folder with its log."""
    folder = tmp_path / "run"
    played.write(folder / "events.jsonl")
    return folder


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def rewrite(run: Path, events: Sequence[AnyEvent]) -> None:
    """Write events with new numbers, as a run that had said no others would have."""
    write_log(run / "events.jsonl", [msgspec.structs.replace(event, seq=seq) for seq, event in enumerate(events, 1)])


def test_an_unchanged_log_replays_with_exit_code_0(run: Path) -> None:
    done = call("replay", run)
    assert (done.exit_code, done.stdout.partition(":")[0]) == (0, "identical")
    assert "4 verdicts, 2 plans, 6 fates of groups" in done.stdout
    assert call("replay", run / "events.jsonl").exit_code == 0


def test_a_changed_reward_exits_1_and_names_its_event(run: Path) -> None:
    events = list(read_events(run))
    at = next(place for place, event in enumerate(events) if isinstance(event, Put) and event.group == 3)
    put_event = events[at]
    assert isinstance(put_event, Put)
    events[at] = msgspec.structs.replace(put_event, tags={**put_event.tags, "reward": [0.0, 0.5]})
    rewrite(run, events)
    done = call("replay", run)
    assert done.exit_code == 1
    assert (
        f"the replay differs at event {put_event.seq}, put group 3: its tags were changed after the put" in done.stdout
    )


def test_a_what_if_prints_both_sides_and_exits_0(run: Path) -> None:
    done = call("replay", run, "--max-staleness", "1", "--set", "filters=[]", "--filter", "truncated")
    assert done.exit_code == 0
    rows = {" ".join(words[:-2]): words[-2:] for words in map(str.split, done.stdout.replace("*", "").splitlines())}
    assert rows["groups kept"] == ["2", "2"]
    assert rows["groups dropped: zero_std"] == ["1", "0"]
    assert rows["groups dropped: stale"] == ["1", "2"]
    assert rows["trained at age 2"] == ["2", "0"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-staleness", "-1"], "--max-staleness (rollout.max_staleness) is -1"),
        (["--set", "rollout.max_stalenes=1"], "did you mean rollout.max_staleness?"),
        (["--set", "rollout.group_size=3"], "the recorded groups have 2 samples"),
        (["--filter", "nosuch:Filter"], "nosuch"),
        (["--step", "1"], "--step and --out go together"),
        (["--step", "9", "--out", "x.safetensors"], "the log has no step 9"),
        (["--step", "1", "--out", "x.safetensors"], "tensors are kept by runs with --record tensors"),
        (["--step", "1", "--out", "x", "--max-staleness", "1"], "cannot be combined with a what-if"),
    ],
)
def test_bad_input_exits_2_and_says_what_is_wrong(
    run: Path, options: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run)
    done = call("replay", run, *options)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    "command", [["replay"], ["ledger"], ["trace", "validate"], ["trace", "cat"], ["trace", "stats"]]
)
def test_a_run_that_is_not_there_exits_2_with_its_name(tmp_path: Path, command: list[str]) -> None:
    done = call(*command, tmp_path / "nowhere")
    assert done.exit_code == 2
    assert "nowhere" in done.stderr


def broken_off(log: Path) -> None:
    whole = gzip.compress(log.read_bytes())
    (log.parent / "events-000001.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    log.unlink()


def unheard_of(log: Path) -> None:
    log.write_bytes(log.read_bytes() + b'{"type":"exploded","seq":99}\n')


def from_the_future(log: Path) -> None:
    log.write_bytes(log.read_bytes().replace(b'"schema":3', b'"schema":99'))


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda log: log.write_bytes(b""), "empty"),
        (broken_off, "events-000001.jsonl.gz is not a complete compressed file"),
        (unheard_of, "Invalid value 'exploded'"),
        (from_the_future, "schema 99, and this asyncrl reads up to 3"),
        (lambda log: log.write_bytes(b"\x00\xff\n"), "line 1"),
    ],
)
@pytest.mark.parametrize(
    "command",
    ["replay", "replay --max-staleness 1", "ledger", "trace cat", "trace stats", "trace slice", "trace anonymise"],
)
def test_a_log_that_cannot_be_read_exits_2_and_says_why(
    run: Path, harm: Callable[[Path], Any], says: str, command: str
) -> None:
    harm(run / "events.jsonl")
    out = ["--out", run / "new.jsonl"] if command.rsplit(maxsplit=1)[-1] in ("slice", "anonymise") else []
    done = call(*command.split(), run, *out)
    assert (done.exit_code, says in " ".join(done.stderr.split())) == (2, True), done.stderr
    assert not (run / "new.jsonl").exists()
    checked = call("trace", "validate", run)
    assert (checked.exit_code, says in checked.stdout) == (1, True)


def test_a_log_of_which_events_are_missing_cannot_be_asked(run: Path) -> None:
    rewrite(run, [event for event in read_events(run) if not isinstance(event, Dispatched)])
    done = call("replay", run, "--max-staleness", "1")
    assert (done.exit_code, "the log is not whole: event" in done.stderr) == (2, True)
    assert call("replay", run).exit_code == 1


def test_the_limit_of_a_what_if_stands_under_it(run: Path) -> None:
    done = call("replay", run, "--max-staleness", "1")
    assert "versions would have moved otherwise" in done.stdout
    assert "asyncrl simulate --from RUN" in done.stdout


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--from", "5", "--to", "3"), "--from 5 comes after --to 3"),
        (("--from", "-1"), "--from"),
        (("--group", "-1"), "--group"),
    ],
)
def test_bounds_that_hold_nothing_are_refused(run: Path, options: tuple[str, ...], says: str) -> None:
    done = call("trace", "cat", run, *options)
    assert (done.exit_code, says in done.stderr) == (2, True)


def test_the_ledger_proves_a_whole_run_and_names_a_sample_without_a_fate(run: Path) -> None:
    done = call("ledger", run)
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "each of 12 samples has one fate")
    assert "dropped:zero_std         2" in done.stdout
    rewrite(run, [e for e in read_events(run) if not (isinstance(e, Settled) and e.group == 1)])
    done = call("ledger", run)
    assert done.exit_code == 1
    assert "group 1 (v1_p1_g0 to v1_p1_g1): no fate" in done.stdout


def test_a_log_that_breaks_off_says_so(run: Path) -> None:
    rewrite(run, list(read_events(run))[:8])
    done = call("ledger", run)
    says = "the log is not whole: it breaks off after event 8, before its run_ended: it was killed, or still goes on"
    assert (done.exit_code, says in done.stderr) == (2, True)
    assert "no fate; dispatched by event" in done.stdout
    done = call("trace", "validate", run)
    assert (done.exit_code, "the log breaks off after event 8" in done.stdout) == (1, True)


def test_validate_passes_a_whole_log(run: Path) -> None:
    done = call("trace", "validate", run)
    assert (done.exit_code, "is a valid log" in done.stdout) == (0, True)


def test_cat_prints_json_lines_of_the_types_and_groups_asked_for(run: Path) -> None:
    done = call("trace", "cat", run, "--type", "judged", "--type", "settled", "--group", "1")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["type"] for line in lines] == ["run_started", "judged", "settled"]
    done = call("trace", "cat", run, "--from", "3", "--to", "5")
    assert [json.loads(line)["seq"] for line in done.stdout.splitlines()] == [1, 3, 4, 5]
    done = call("trace", "cat", run, "--type", "verdict")
    assert (done.exit_code, "--type verdict is not a type of event; the types are acknowledged" in done.stderr) == (
        2,
        True,
    )


def test_stats_count_the_run_again(run: Path) -> None:
    done = call("trace", "stats", run)
    rows = {line.rpartition("  ")[0].strip(): line.split()[-1] for line in done.stdout.splitlines()}
    assert rows["steps"] == "2"
    assert rows["samples failed: generation_error"] == "2"
    summary = json.loads(call("trace", "stats", run, "--json").stdout)
    assert summary["ledger"]["trained"] == 4
    assert summary["exit"] == {"code": 0, "reason": "data exhausted"}


def test_slice_and_anonymise_write_logs_and_overwrite_none(run: Path, tmp_path: Path) -> None:
    part = tmp_path / "part.jsonl"
    assert call("trace", "slice", run, "--out", part, "--group", "1").exit_code == 0
    assert {type(event).__name__ for event in read_events(part)} >= {"RunStarted", "Put", "Judged", "Settled"}
    hidden = tmp_path / "hidden.jsonl"
    assert call("trace", "anonymise", run, "--out", hidden).exit_code == 0
    assert call("replay", hidden).exit_code == 0
    before = hidden.read_bytes()
    done = call("trace", "anonymise", run, "--out", hidden)
    assert (done.exit_code, "exists already" in done.stderr) == (2, True)
    assert hidden.read_bytes() == before
