"""`asyncrl filters new`, from the command line to a dry run with the filter."""

import subprocess
import sys
from pathlib import Path


def asyncrl(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "asyncrl", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_a_new_filter_comes_with_a_test_that_passes_and_is_not_overwritten(tmp_path: Path) -> None:
    assert asyncrl(tmp_path, "filters", "new", "ShortOnly").returncode == 0
    test = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_short_only.py"]
    done = subprocess.run(test, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout
    again = asyncrl(tmp_path, "filters", "new", "ShortOnly")
    assert (again.returncode, "nothing was written" in again.stderr) == (2, True)
    assert asyncrl(tmp_path, "train", "--dry-run", "--filter", "short_only:ShortOnly").returncode == 0
