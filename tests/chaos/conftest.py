"""How many random schedules to run: `--schedules N`. The package `kit` is found by tests, as by `scripts/chaos`."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

SCHEDULES = 2000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--schedules", type=int, default=SCHEDULES, help=f"Random schedules of tests/chaos (default {SCHEDULES})."
    )


@pytest.fixture
def schedules(request: pytest.FixtureRequest) -> int:
    """How many schedules one test may run."""
    # The option exists when this folder was named on the command line.
    count: int = request.config.getoption("--schedules", SCHEDULES)
    return count
