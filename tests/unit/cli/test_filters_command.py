"""`asyncrl filters`: the list, an explanation, and a start whose test passes."""

import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.filters.load import BUILT_IN


def asyncrl(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "asyncrl", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_the_list_names_every_built_in_with_a_line_of_help(tmp_path: Path) -> None:
    lines = {line.split()[0]: line for line in asyncrl(tmp_path, "filters").stdout.splitlines() if line}
    for name in BUILT_IN:
        assert len(lines[name].split()) > 3


def test_show_explains_parameters_and_tags(tmp_path: Path) -> None:
    text = asyncrl(tmp_path, "filters", "show", "staleness").stdout
    assert "max_age: int | None, default None" in text
    assert "needs tags: version, dataset" in text


@pytest.mark.parametrize(("arguments", "says"), [(("show", "zero_stt"), "zero_std"), (("new", "2bad"), "class name")])
def test_a_bad_name_ends_with_code_2(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    done = asyncrl(tmp_path, "filters", *arguments)
    assert (done.returncode, says in done.stderr) == (2, True)


def test_a_new_filter_comes_with_a_test_that_passes_and_is_not_overwritten(tmp_path: Path) -> None:
    assert asyncrl(tmp_path, "filters", "new", "ShortOnly").returncode == 0
    test = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_short_only.py"]
    done = subprocess.run(test, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout
    again = asyncrl(tmp_path, "filters", "new", "ShortOnly")
    assert (again.returncode, "nothing was written" in again.stderr) == (2, True)
    assert asyncrl(tmp_path, "train", "--dry-run", "--filter", "short_only:ShortOnly").returncode == 0
