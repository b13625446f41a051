"""Tests that need a GPU: `pytest -m gpu tests/gpu`; without one they are skipped."""

from collections.abc import Generator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, None, None]:
    # Before pytest-xdist's own hook, which reads the groups.
    count = torch.cuda.device_count()
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.xdist_group("gpu"))
        needed = item.get_closest_marker("gpus")
        wanted = needed.args[0] if needed else 1
        if count < wanted:
            item.add_marker(pytest.mark.skip(reason=f"{wanted} GPUs are needed, torch sees {count}"))
    return (yield)
