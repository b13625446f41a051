"""What the command imports before it knows what to do, and that `python -O` changes no check."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HEAVY = ("torch", "ray", "transformers", "transfer_queue", "tensordict")

ASK = """
import contextlib, io, json, sys
from asyncrl.engine.cli import app
found = []
for arguments in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = app(arguments, standalone_mode=True)
        except SystemExit as end:
            code = end.code
    found.append([code, out.getvalue(), err.getvalue()])
heavy = [name for name in %r if name in sys.modules]
print(json.dumps({"found": found, "heavy": heavy, "asserts": __debug__}))
"""


def ask(folder: Path, commands: list[list[str]], *flags: str) -> Any:
    """Run several commands in one fresh interpreter."""
    done = subprocess.run(
        [sys.executable, *flags, "-c", ASK % (HEAVY,), json.dumps(commands)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


WRONG = [
    *[f"rollout.max_staleness={value}" for value in ("-1", "1.5", "two")],
    "rollout.groups_per_step=0",
    "rollout.group_size=0",
    "rollout.max_publish_lag=-1",
    "rollout.max_publish_lag=3",
    "trainer.ranks=0",
    "trainer.micro_batch_tokens=0",
    "filters=[{name: dynamic_sampling, max_attempts: -1}]",
    "filters=[{name: dynamic_sampling, max_attempts: 0}]",
    "task.epochs=0",
    "rollout.max_stalenes=3",
    "max_staleness=3",
    "a.b.c=1",
    "model.path=/no/such/folder",
]


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    """Help answers in under a second because torch and Ray are not there yet."""
    answer = ask(tmp_path, [["--help"], ["train", "--help"], ["config", "--help"], ["doctor", "--help"], ["--version"]])
    assert [code for code, _, _ in answer["found"]] == [0] * 5
    assert answer["heavy"] == []
    root, train, *_ = [out for _, out, _ in answer["found"]]
    assert all(name in root for name in ("train", "config", "doctor"))
    options = ("--config", "--max-staleness", "--steps", "--seed", "--run-dir", "--runtime", "--filter", "--set")
    assert all(option in train for option in (*options, "--dry-run"))


def test_bad_input_is_refused_alike_with_and_without_asserts(tmp_path: Path) -> None:
    """J1, J3, J5: exit code 2, the option and its value in the message, nothing heavy imported, also under -O."""
    commands = [["train", "--set", text] for text in WRONG]
    plain, optimised = ask(tmp_path, commands), ask(tmp_path, commands, "-O")
    assert (plain["asserts"], optimised["asserts"]) == (True, False)
    assert plain["found"] == optimised["found"]
    for text, (code, out, err) in zip(WRONG, plain["found"], strict=True):
        path, _, value = text.partition("=")
        assert (code, out) == (2, ""), text
        assert path.rpartition(".")[2].removesuffix("s") in err or "max_attempts" in err
        assert value.rpartition(" ")[2].removesuffix("}]") in err
        assert "Traceback" not in err
    assert plain["heavy"] == []
    assert list(tmp_path.glob("runs*")) == []


def test_a_dry_run_checks_everything_and_starts_nothing(tmp_path: Path) -> None:
    """J5: the good case exits 0 and prints the values in force; no folder is made, nothing heavy comes in."""
    (tmp_path / "user_filters.py").write_text(
        "from asyncrl.filters import BaseRolloutFilter, keep\n"
        "class Fine(BaseRolloutFilter):\n"
        "    def judge(self, group, context):\n"
        "        return keep()\n",
        encoding="utf-8",
    )
    answer = ask(tmp_path, [["train", "--dry-run", "--max-staleness", "1", "--filter", "user_filters:Fine"]])
    ((code, out, err),) = answer["found"]
    assert (code, err) == (0, "")
    assert any(line.split() == ["rollout.max_staleness", "=", "1", "#", "--max-staleness"] for line in out.splitlines())
    assert answer["heavy"] == []
    assert not (tmp_path / "runs").exists()
