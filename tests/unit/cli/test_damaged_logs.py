"""Damaged logs: every command that reads one says what is wrong, with file and line, and ends with code 2."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from asyncrl.engine.cli import app
from asyncrl.engine.testing.trace import play, put, version

COMMANDS = [
    "replay",
    "replay --max-staleness 1",
    "ledger",
    "plan show",
    "simulate --steps 1 --from",
    "trace cat",
    "trace stats",
    "trace slice --out new.jsonl",
    "trace anonymise --out new.jsonl",
]
SCRIPT = [put([0, 1]), put([1, 1]), version(6), put([0, 1], version=4), put([0, 1])]

Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "events.jsonl"
    play(SCRIPT, trainer__ranks=2).write(path)
    return path.read_bytes()


@pytest.fixture
def log(whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run" / "events.jsonl"
    path.parent.mkdir()
    path.write_bytes(whole)
    return path


def call(command: str, log: Path) -> Result:
    return CliRunner().invoke(app, [*command.split(), str(log.parent)])


def place_of(lines: Lines, kind: str) -> int:
    return next(at for at, line in enumerate(lines) if line["type"] == kind)


def changed(change: Callable[[Lines], object]) -> Callable[[Path], None]:
    def harm(log: Path) -> None:
        lines = [json.loads(line) for line in log.read_bytes().splitlines()]
        change(lines)
        log.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    return harm


def of_put(**tags: Any) -> Callable[[Path], None]:
    return changed(lambda lines: lines[place_of(lines, "put")]["tags"].update(tags))


def nested(log: Path) -> None:
    lines = log.read_bytes().splitlines(keepends=True)
    lines.insert(3, b'{"type":"resumed","a":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n")
    log.write_bytes(b"".join(lines))


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a newer schema": (changed(lambda lines: lines[0].update(schema=99)), "schema 99, and this asyncrl reads up to"),
    "a tag list that is too short": (
        of_put(reward=[0.0]),
        "events.jsonl, line 5: event 5, put of group 0: tag 'reward' has 1 values for 2 samples",
    ),
    "text as a reward": (of_put(reward=["1", 0.0]), "events.jsonl, line 5: event 5, put of group 0: Expected `"),
    "text as a count": (of_put(prompt_tokens="8"), "events.jsonl, line 5: event 5, put of group 0: Expected `int`"),
    "a count that no sample has": (
        of_put(response_tokens=[10**30, 1]),
        "events.jsonl, line 5: event 5, put of group 0",
    ),
    "spans that are none": (of_put(spans=["0:0", "x"]), "events.jsonl, line 5: event 5, put of group 0: tag 'spans'"),
    "a key that is none": (changed(lambda lines: lines[4].update(keys=["a", "b"])), "line 5: event 5, put of group 0"),
    "another group's tags": (of_put(group=9), "line 5: event 5, put of group 0: its tags are of group 9"),
    "JSON nested 100,000 deep": (nested, "events.jsonl, line 4: "),
    "a line taken out": (changed(lambda lines: lines.pop(6)), "events.jsonl, line 7: event 8 follows event 6"),
    "a line twice": (changed(lambda lines: lines.insert(6, lines[5])), "events.jsonl, line 7: event 6 follows event 6"),
    "text where a number belongs": (changed(lambda lines: lines[7].update(t="now")), "events.jsonl, line 8: Expected"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_damaged_log_exits_2_with_file_and_line_in_every_command(log: Path, command: str) -> None:
    """FOUND-I11: tracebacks, "identical" and "each sample has one fate" before."""
    sound = log.read_bytes()
    for damage, (harm, says) in DAMAGES.items():
        log.write_bytes(sound)
        harm(log)
        done = call(command, log)
        said = " ".join(done.stderr.split())
        assert (done.exit_code, says in said) == (2, True), (damage, done.output, done.exception)
        assert not Path("new.jsonl").exists()


def test_the_same_damage_is_a_problem_of_validate(log: Path) -> None:
    """FOUND-I11: it lists what is wrong, so that its exit code is 1."""
    sound = log.read_bytes()
    for damage, (harm, _) in DAMAGES.items():
        log.write_bytes(sound)
        harm(log)
        assert call("trace validate", log).exit_code == 1, damage


@pytest.mark.parametrize(("command", "proved"), [("replay", "identical"), ("ledger", "has one fate")])
@pytest.mark.parametrize("kept", [1, 7, -1])
def test_nothing_is_called_identical_or_proved_of_a_log_that_breaks_off(
    log: Path, command: str, proved: str, kept: int
) -> None:
    """FOUND-I11: "identical: 0 verdicts", exit code 0; also where every sample that it names has a fate."""
    assert proved in call(command, log).stdout
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:kept]))
    done = call(command, log)
    assert (done.exit_code, proved in done.stdout) == (2, False)
    end = len(lines[:kept])
    assert f"the log is not whole: it breaks off after event {end}, before its run_ended" in done.stderr


def test_the_log_of_a_killed_run_can_still_be_looked_at(log: Path) -> None:
    """FOUND-I11: a torn last line, and no end, are what a kill leaves."""
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:-2]) + lines[-2][:20])
    for command in ["plan show", *COMMANDS[-4:]]:
        Path("new.jsonl").unlink(missing_ok=True)
        assert call(command, log).exit_code == 0, command


def test_a_slice_says_that_it_is_one_and_is_read_and_counted_but_proves_nothing(log: Path) -> None:
    """FOUND-I11: events are missing from it on purpose; a slice that is a beginning only breaks off."""
    part = Path("part") / "events.jsonl"
    part.parent.mkdir()
    assert call("trace slice --group 0 --out part/events.jsonl", log).exit_code == 0
    assert call("trace cat", part).exit_code == 0
    for command in ("replay", "replay --max-staleness 1", "ledger"):
        done = call(command, part)
        assert (done.exit_code, "it is a slice of a run's" in done.stderr) == (2, True)
    part.unlink()
    assert call("trace slice --to 9 --out part/events.jsonl", log).exit_code == 0
    done = call("replay", part)
    assert (done.exit_code, "no difference as far as the log goes" in done.stdout) == (2, True)


def test_a_log_without_its_beginning_proves_nothing(log: Path) -> None:
    """FOUND-I11: such as one segment of several."""
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[4:]))
    for command in ("replay", "ledger"):
        assert call(command, log).exit_code == 2


def test_a_plan_of_samples_that_the_log_does_not_have_exits_2(log: Path) -> None:
    """FOUND-I11: `plan show` met it as a KeyError."""
    changed(lambda lines: lines[place_of(lines, "put")]["tags"].pop("response_tokens"))(log)
    done = call("plan show --step 1", log)
    assert (done.exit_code, "no put of v0_p0_g0 with its tokens" in done.stderr.replace("\n", " ")) == (2, True)
    assert call("replay", log).exit_code == 2
