"""The example of the guide on traces, as a user would run it."""

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_example_of_the_guide_runs(tmp_path: Path) -> None:
    """docs/traces.md: its Python is written to files and run by pytest, first to write the golden trace."""
    blocks = (DOCS / "traces.md").read_text(encoding="utf-8").split("```python\n")[1:]
    files = 0
    for block in blocks:
        first, _, code = block.partition("```")[0].partition("\n")
        if first.startswith("# "):
            (tmp_path / first.removeprefix("# ")).write_text(code, encoding="utf-8")
            files += 1
    assert files == 4
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    for options in (["--refresh-traces"], []):
        done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
    assert (tmp_path / "traces" / "short_only.jsonl").exists()
    assert "passed" in done.stdout
