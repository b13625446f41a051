"""The guide on rewards, as a newcomer would follow it: its files are written, and its commands run."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

GUIDE = Path(__file__).parents[2] / "docs" / "rewards.md"


def test_the_files_of_the_guide_are_written_and_its_commands_run(tmp_path: Path, warm_python: Any) -> None:
    text = GUIDE.read_text(encoding="utf-8")
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, flags=re.S):
        (tmp_path / name).write_text(code, encoding="utf-8")
    commands = [line for block in re.findall(r"```bash\n(.*?)```", text, flags=re.S) for line in block.splitlines()]
    assert len(commands) == 3
    for command in commands:
        program, first, *rest = shlex.split(command)
        words = ["-m", "asyncrl", first] if program == "asyncrl" else ["-c", (tmp_path / first).read_text()]
        done = warm_python(tmp_path, *words, *rest)
        assert done.returncode == 0, done.stdout + done.stderr
    plain, ranked = (
        json.loads((run / "summary.json").read_text(encoding="utf-8")) for run in sorted((tmp_path / "runs").iterdir())
    )
    assert len((tmp_path / "train.jsonl").read_text(encoding="utf-8").splitlines()) == 200
    assert (plain["steps"], set(plain["reward_parts"])) == (2, {"score"})
    assert 0 < plain["reward_first_10"] < 1
    assert (ranked["steps"], set(ranked["reward_parts"])) == (2, {"exact_match", "shortest"})


def test_the_yaml_of_the_guide_is_a_configuration_that_loads(tmp_path: Path, monkeypatch: Any) -> None:
    from asyncrl.collectors.rewards.load import load_rewards
    from asyncrl.configs import load_config

    text = GUIDE.read_text(encoding="utf-8")
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, flags=re.S):
        (tmp_path / name).write_text(code, encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.S)
    (tmp_path / "run.yaml").write_text(block, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    functions = load_rewards(load_config("run.yaml").reward.functions)
    assert [(f.part, f.weight) for f in functions] == [("exact_match", 1.0), ("reasons", 0.5), ("length", 0.0)]
