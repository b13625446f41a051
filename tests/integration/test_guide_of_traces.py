"""The example of the guide on traces, as a user would run it."""

from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


def test_the_example_of_the_guide_runs(tmp_path: Path, warm_python: Any) -> None:
    """docs/traces.md: its Python is written to files and run by pytest, first to write the golden trace."""
    blocks = (DOCS / "traces.md").read_text(encoding="utf-8").split("```python\n")[1:]
    files = 0
    for block in blocks:
        first, _, code = block.partition("```")[0].partition("\n")
        if first.startswith("# "):
            (tmp_path / first.removeprefix("# ")).write_text(code, encoding="utf-8")
            files += 1
    assert files == 4
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    for options in (["--refresh-traces"], []):
        done = warm_python(tmp_path, *command, *options)
        assert done.returncode == 0, done.stdout
    assert (tmp_path / "traces" / "short_only.jsonl").exists()
    assert "passed" in done.stdout
