"""Weights between processes on Ray: the contract over the object store, and runs by other ways."""

import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import BlockingPortal

from asyncrl.engine.aio.blocking import in_thread
from asyncrl.engine.testing.conformance.weight_transports import CONTRACT, Build, Line
from asyncrl.engine.weights.delta import Delta
from asyncrl.engine.weights.ray_store import RayObjectStore

pytestmark = pytest.mark.ray


@pytest.mark.parametrize("test", CONTRACT, ids=lambda test: test.__name__)
@pytest.mark.parametrize("delta", [False, True])
def test_the_contract_holds_over_the_object_store(
    delta: bool, test: Callable[[Line], Awaitable[None]], portal: BlockingPortal, cluster: None
) -> None:
    whole: Build = lambda name: RayObjectStore()  # noqa: E731
    portal.call(test, Line.of((lambda name: Delta(whole(name), blocking=in_thread)) if delta else whole))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_run_with_weights_as_changes_in_files_of_shared_memory(
    tmp_path: Path, warm_python: Callable[..., Any]
) -> None:
    """Every version reaches the collector in another process, and nothing of any is left."""
    memory = tmp_path / "memory"
    memory.mkdir()
    settings = ("trainer.weight_transport=shared_memory", f"data_plane.shared_memory={memory}", "run.batches=6")
    more = ("trainer.weight_delta=true", "model.dtype=bfloat16", "trainer.learning_rate=1e-6")
    words = [word for setting in (*settings, *more) for word in ("--set", setting)]
    done = warm_python(tmp_path, "-m", "asyncrl", "train", "--run-dir", "run", *words, ray=True)
    assert done.returncode == 0, done.stdout + done.stderr
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    published = [event for event in events if event["type"] == "published"]
    assert len(published) >= 2
    assert all(event["transfer_s"] > 0 and event["gather_s"] > 0 for event in published)
    assert published[-1]["sent_bytes"] < published[0]["sent_bytes"] / 2
    assert os.listdir(memory) == []
