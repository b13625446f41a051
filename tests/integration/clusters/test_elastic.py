"""On a real cluster: a node that is added brings a collector, and one that is drained takes it along, in order."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engine.events.log import read_events
from asyncrl.engine.events.types import AnyEvent, CollectorJoined, CollectorLeft, Dispatched, OwnerDead, RunEnded

pytestmark = [pytest.mark.nodes, pytest.mark.ray]

OPTIONS = {
    "filters": "[]",
    "trainer.ranks": "1",
    "collector.score_processes": "0",
    "rollout.groups_per_step": "4",
    "rollout.group_size": "4",
    "run.batches": "null",
    "run.save_model": "false",
    "checkpoint.at_end": "false",
    # A collector fills a node, and so there is no room for another one before there is another node.
    "collector.threads": "4",
    "cluster.max_collectors": "2",
    "cluster.layout": "apart",
    "supervision.start_timeout_s": "240",
    "supervision.restarts": "0",
}


def events(folder: Path, kind: type[AnyEvent]) -> list[Any]:
    log = folder / "out/events.jsonl"
    if not log.exists():
        return []
    # The last line may be half written.
    whole = folder / "whole.jsonl"
    whole.write_text("".join(log.read_text(encoding="utf-8").splitlines(keepends=True)[:-1]), encoding="utf-8")
    return [event for event in read_events(whole) if isinstance(event, kind)]


@pytest.mark.timeout(400)
def test_a_node_that_is_added_is_used_and_one_that_is_drained_is_left(
    tmp_path: Path, warm_python: Any, raylets: Any
) -> None:
    """The log replays, the ledger is exact, nothing dies, and the drained node ends empty."""
    folder = tmp_path / "run"
    folder.mkdir()
    words = [word for key, value in OPTIONS.items() for word in ("--set", f"{key}={value}")]
    command = ("-m", "asyncrl", "train", "--max-staleness", "2", "--ray-address", raylets.address, *words)
    run = warm_python.start(folder, *command, "--run-dir", "out")

    def wait(what: str, timeout_s: float, until: Any) -> None:
        deadline = time.monotonic() + timeout_s
        while not until():
            assert run.poll() is None, run.communicate(1)
            assert time.monotonic() < deadline, what
            time.sleep(0.5)

    try:
        wait("a first grant", 200, lambda: events(folder, Dispatched))
        assert not events(folder, CollectorJoined)
        raylets.add(4)
        wait("a collector joins", 120, lambda: events(folder, CollectorJoined))
        wait("it is granted groups", 60, lambda: "collector1" in {e.collector for e in events(folder, Dispatched)})
        raylets.drain_last(60)
        wait("it leaves", 90, lambda: events(folder, CollectorLeft))
        left = events(folder, CollectorLeft)[0].seq
        wait("the run goes on", 60, lambda: [e for e in events(folder, Dispatched) if e.seq > left + 20])
    finally:
        if run.poll() is None:
            run.send_signal(signal.SIGTERM)
    out, err = run.communicate(120)
    assert run.returncode == 143, out + err
    [joined], [gone] = events(folder, CollectorJoined), events(folder, CollectorLeft)
    assert joined.collector == gone.collector == "collector1"
    assert events(folder, OwnerDead) == []
    *_, end = read_events(folder / "out")
    assert isinstance(end, RunEnded)
    assert end.keys_left == 0
    for asked in ("ledger", "replay"):
        done = warm_python(folder, "-m", "asyncrl", asked, "out")
        assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((folder / "out/summary.json").read_text(encoding="utf-8"))
    assert summary["exit"]["code"] == 143
    raylets.wait_until_empty(20)
