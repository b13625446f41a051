"""Fixtures for users' tests, installed with asyncrl. Imports neither ray, torch nor transfer_queue."""

from collections.abc import Callable
from typing import Any

import pytest

from asyncrl.engine.records import GroupMeta
from asyncrl.filters.testing import check_filter, make_group


@pytest.fixture
def rollout_group() -> Callable[..., GroupMeta]:
    """Make a group by hand: `rollout_group([0.0, 1.0], lengths=[5, 9])`."""
    return make_group


@pytest.fixture
def check_rollout_filter() -> Callable[..., Any]:
    """Run a filter class through its contract: `check_rollout_filter(MyFilter)`."""
    return check_filter
