"""Small runs of the default task in this process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl import Summary, run

Small = Callable[..., Summary]

SMALL = {
    "run.runtime": "local",
    "run.batches": 3,
    "rollout.groups_per_step": 2,
    "rollout.group_size": 4,
    "filters": [],
}


@pytest.fixture
def small(tmp_path: Path) -> Small:
    """Run a few small batches, in the folder `out` unless told otherwise."""

    def start(overrides: dict[str, Any] | None = None, *, directory: str = "out", **options: Any) -> Summary:
        return run("default", tmp_path / directory, {**SMALL, **(overrides or {})}, **options)

    return start
