"""`asyncrl filters new`, from the command line to a dry run with the filter."""

from functools import partial
from pathlib import Path
from typing import Any


def test_a_new_filter_comes_with_a_test_that_passes_and_is_not_overwritten(tmp_path: Path, warm_python: Any) -> None:
    asyncrl = partial(warm_python, tmp_path, "-m", "asyncrl")
    assert asyncrl("filters", "new", "ShortOnly").returncode == 0
    done = warm_python(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_short_only.py")
    assert done.returncode == 0, done.stdout
    again = asyncrl("filters", "new", "ShortOnly")
    assert (again.returncode, "nothing was written" in again.stderr) == (2, True)
    assert asyncrl("train", "--dry-run", "--filter", "short_only:ShortOnly").returncode == 0
