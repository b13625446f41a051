"""How many random schedules to run: `--schedules N`."""

import pytest

FEW = 500


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--schedules", type=int, default=FEW, help=f"Random schedules of tests/chaos (default {FEW}).")


@pytest.fixture
def schedules(request: pytest.FixtureRequest) -> int:
    """How many schedules one test may run."""
    count: int = request.config.getoption("--schedules")
    return count
