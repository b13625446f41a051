"""The environment of a run's processes."""

import os
import sys

import pytest

from asyncrl.engine.lifecycle.process_env import prepare


def test_under_uv_run_workers_use_the_environment_that_the_driver_runs_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """FOUND-C18: Ray's hook would pack up the working folder, and have uv build it anew for each worker."""
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(sys, "modules", {name: m for name, m in sys.modules.items() if name != "ray"})
    prepare(1)
    # Ray takes it from there when it is imported, and has the hook on without it.
    assert os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] == "0"
