"""The environment of a run's processes."""

import os
import sys
from types import SimpleNamespace

import pytest

from asyncrl.engine.errors import ConfigError
from asyncrl.engine.lifecycle.process_env import check_no_other_ray, prepare, prepared


def test_under_uv_run_workers_use_the_environment_that_the_driver_runs_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """FOUND-C18: Ray's hook would pack up the working folder, and have uv build it anew for each worker."""
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(sys, "modules", {name: m for name, m in sys.modules.items() if name != "ray"})
    prepare(1)
    # Ray takes it from there when it is imported, and has the hook on without it.
    assert os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] == "0"


def test_processes_do_not_keep_memory_for_each_of_their_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five micro-batches of 135 million weights, each in a thread of its own, left 3.4 GB behind instead of 1.9."""
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(sys, "modules", {name: m for name, m in sys.modules.items() if name != "ray"})
    prepare(1)
    # Processes that are started from here on read it when they start.
    assert os.environ["MALLOC_ARENA_MAX"] == "2"


def test_rays_own_process_keeps_no_record_of_calls_in_a_cluster_of_the_runs_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It grew from 29 to 382 MB in 30 minutes of small steps. In a cluster that is joined its owner decides."""
    for joins, expected in ((None, "0"), ("10.0.0.1:6379", None)):
        monkeypatch.setattr(os, "environ", {})
        monkeypatch.setattr(sys, "modules", {name: m for name, m in sys.modules.items() if name != "ray"})
        prepare(1, joins=joins)
        found = {name.lower(): value for name, value in os.environ.items()}
        assert found.get("ray_task_events_report_interval_ms") == expected


def test_the_environment_is_as_it_was_after_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user has set stays all along."""
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "7"})
    with prepared(1):
        assert os.environ["OMP_NUM_THREADS"] == "7"
        assert os.environ["TQ_NUM_THREADS"] == "1"
    assert os.environ == {"OMP_NUM_THREADS": "7"}


@pytest.mark.parametrize(
    ("open_to_all", "started", "words"),
    [(True, False, "has imported ray before the run"), (False, True, "Ray runs in this process already")],
)
def test_a_ray_of_somebody_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, open_to_all: bool, started: bool, words: str
) -> None:
    modules = {
        "ray": SimpleNamespace(is_initialized=lambda: started),
        "ray._private.ray_constants": SimpleNamespace(ENABLE_RAY_CLUSTER=open_to_all),
    }
    monkeypatch.setattr(sys, "modules", {**sys.modules, **modules})
    with pytest.raises(ConfigError, match=words):
        check_no_other_ray()


def test_a_ray_of_a_run_before_is_none_of_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was imported with the setting, which is gone from the environment since."""
    modules = {
        "ray": SimpleNamespace(is_initialized=lambda: False),
        "ray._private.ray_constants": SimpleNamespace(ENABLE_RAY_CLUSTER=False),
    }
    monkeypatch.setattr(sys, "modules", {**sys.modules, **modules})
    monkeypatch.setattr(os, "environ", {})
    check_no_other_ray()
    prepare(1)
