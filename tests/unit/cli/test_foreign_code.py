"""Files of others run nothing: neither a log nor a run's folder can have code imported that the user does not name."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from asyncrl.configs.named_code import named_code
from asyncrl.engine.cli import app
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.evaluate import recorded_config
from asyncrl.engine.running.resume import Resumption, find, resumed_config
from asyncrl.engine.running.seal import FILE_NAME, seal, sealed_code
from asyncrl.engine.testing.trace import play, put

MODULE = "theirs_to_run"
FILTER = f"{MODULE}.py:Theirs"
SCRIPT = [put([0, 1]), put([0, 1])]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder of another's, which came with a module that leaves a file when it is imported."""
    (tmp_path / f"{MODULE}.py").write_text(
        f"from pathlib import Path\nPath({str(tmp_path / 'CANARY')!r}).touch()\n"
        "from asyncrl.filters import BaseRolloutFilter, keep\n"
        "class Theirs(BaseRolloutFilter):\n"
        "    def judge(self, group, context):\n"
        "        return keep()\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    play(SCRIPT).write(tmp_path / "run" / "events.jsonl")
    return tmp_path / "run"


def name_in(run: Path, path: str, value: Any) -> None:
    """Have a run's configuration name something."""
    log = run / "events.jsonl"
    first, *rest = log.read_text(encoding="utf-8").splitlines()
    started = json.loads(first)
    section = started["config"]
    *parents, last = path.split(".")
    for parent in parents:
        section = section[parent]
    section[last] = value
    log.write_text("\n".join([json.dumps(started), *rest, ""]), encoding="utf-8")


def call(command: str, run: Path) -> Result:
    return CliRunner().invoke(app, [*command.split(), str(run)])


def was_imported(run: Path) -> bool:
    return (run.parent / "CANARY").exists()


@pytest.mark.parametrize(
    "command",
    [
        "replay",
        "replay --max-staleness 1",
        "simulate --steps 1 --from",
        "plan launch --from",
        "train --dry-run --resume",
    ],
)
@pytest.mark.parametrize(
    "filters", [[{"name": FILTER}], [{"name": "chain", "filters": [{"name": FILTER}]}]], ids=["chain", "nested chain"]
)
def test_filters_that_only_a_log_names_are_refused_with_the_option_that_allows_them(
    command: str, filters: Any, run: Path
) -> None:
    name_in(run, "filters", filters)
    result = call(command, run)
    assert result.exit_code == 2, result.output
    assert f"--allow-code {FILTER}" in result.output
    assert not was_imported(run)


@pytest.mark.parametrize(
    "command",
    [
        "trace validate",
        "trace stats",
        "trace cat",
        "trace slice --out slice.jsonl",
        "trace anonymise --out plain.jsonl",
        "ledger",
        "plan show",
        "generate --max-new-tokens 1",
        "eval",
    ],
)
def test_what_needs_no_code_reads_such_a_run_and_runs_nothing(command: str, run: Path) -> None:
    name_in(run, "filters", [{"name": FILTER}])
    name_in(run, "task.name", f"{MODULE}:Theirs")
    arguments = ["7>"] if command.startswith("generate") else []
    CliRunner().invoke(app, [*command.split(), str(run), *arguments])
    assert not was_imported(run)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("task.name", FILTER),
        ("environment.name", FILTER),
        ("environment.name", "verifiers"),
        ("reward.functions", [{"name": FILTER}]),
        ("reward.functions", [{"name": "code"}]),
    ],
)
def test_an_evaluation_and_a_resumed_run_take_no_code_from_the_folder(path: str, value: Any, run: Path) -> None:
    name_in(run, path, value)
    with pytest.raises(ConfigError, match="--allow-code"):
        recorded_config(run, [])
    with pytest.raises(ConfigError, match="--allow-code"):
        resumed_config(find(run), [])
    assert not was_imported(run)


def test_the_function_of_an_agent_is_code_too() -> None:
    assert named_code({"environment.options": {"function": "a:b"}}.items()) == ["a:b"]
    assert named_code({"environment.options.function": "a:b"}.items()) == ["a:b"]
    assert named_code({"environment.options": {"name": "a:b"}, "task.name": "echo", "filters": None}.items()) == []


def test_whatever_imports_by_name_is_looked_through_for_code() -> None:
    """Who adds a caller of load_object adds the place of its names to `named_code`."""
    root = Path(named_code.__code__.co_filename).resolve().parents[1]
    calls = {
        path.relative_to(root).as_posix()
        for part in ("collectors", "configs", "engine", "filters", "trainers")
        for path in (root / part).rglob("*.py")
        if "load_object(" in path.read_text(encoding="utf-8") and path.name != "objects.py"
    }
    assert calls == {
        "collectors/environments/agents/agent.py",
        "collectors/environments/load.py",
        "collectors/rewards/load.py",
        "collectors/tasks/load.py",
        "filters/load.py",
    }


def test_a_checkpoint_names_no_code_either(run: Path) -> None:
    """Its run.json is what a run goes on with."""
    config = {"filters": [{"name": FILTER}]}
    with pytest.raises(ConfigError, match="--allow-code"):
        resumed_config(Resumption(run, 1, None, config), [])


@pytest.mark.parametrize("command", ["replay --allow-code", "replay --filter"])
def test_the_user_allows_code_by_naming_it(command: str, run: Path) -> None:
    name_in(run, "filters", [{"name": FILTER}])
    result = call(f"{command} {FILTER}", run)
    assert result.exit_code == 0, result.output
    assert (run.parent / "CANARY").exists()


def test_a_run_of_ones_own_needs_no_permission(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seal holds for the code that was named, and for the key of this user alone."""
    name_in(run, "filters", [{"name": FILTER}])
    assert not seal(run, {"filters": [{"name": FILTER}]})
    assert list(sealed_code(run)) == list(sealed_code(run / "events.jsonl")) == [FILTER]
    resumed_config(find(run), [])
    name_in(run, "task.name", f"{MODULE}:Other")
    with pytest.raises(ConfigError, match=f"--allow-code {MODULE}:Other "):
        resumed_config(find(run), [])

    monkeypatch.setenv("XDG_STATE_HOME", str(run.parent / "another"))
    assert not sealed_code(run)
    assert not seal(run.parent, {"filters": [{"name": "x:Y"}]}), "the other user has a key now"
    assert not sealed_code(run)


@pytest.mark.parametrize(
    "written", [b"", b"null", b'{"code": ["a:b"], "seal": ""}', b'{"code": ["a:b"], "seal": "\xc3\xa4"}']
)
def test_a_seal_that_is_made_up_holds_for_nothing(written: bytes, run: Path) -> None:
    seal(run.parent, {"task": {"name": "a:b"}})
    (run / FILE_NAME).write_bytes(written)
    assert not sealed_code(run)


def test_only_the_user_can_read_the_key(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(run.parent / "state"))
    seal(run, {"task": {"name": "a:b"}})
    (key,) = (run.parent / "state" / "asyncrl").iterdir()
    assert key.stat().st_mode & 0o777 == 0o600


def test_a_run_without_a_place_for_the_key_says_so(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run.parent / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(run.parent / "file"))
    assert "--allow-code" in seal(run, {"task": {"name": "a:b"}})
    assert not sealed_code(run)
