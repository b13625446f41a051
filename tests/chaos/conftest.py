"""How many random schedules to run: `--schedules N`."""

import pytest

SCHEDULES = 500


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
