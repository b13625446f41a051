"""Who starts Ray."""

import threading
import time

import anyio
import pytest
from anyio._backends._asyncio import WorkerThread

from asyncrl.engine.lifecycle import ray_runtime


def test_the_thread_that_started_ray_lives_until_ray_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel kills Ray's processes with it: a run of minutes lost its raylet once other threads had been busy."""
    seen: dict[str, threading.Thread] = {}

    def note(name: str) -> None:
        seen[name] = threading.current_thread()

    monkeypatch.setattr(ray_runtime, "_start_ray", lambda: note("start"))
    monkeypatch.setattr(ray_runtime, "_end_ray", lambda: note("end"))
    # As if ten seconds had passed between any two calls.
    monkeypatch.setattr(WorkerThread, "MAX_IDLE_TIME", 0.0)

    async def main() -> None:
        async with ray_runtime.ray_cluster():
            for _ in range(3):
                async with anyio.create_task_group() as tasks:
                    for _ in range(2):
                        tasks.start_soon(anyio.to_thread.run_sync, time.sleep, 0.02)
            assert seen["start"].is_alive()

    anyio.run(main)
    assert seen["end"] is seen["start"]
    seen["start"].join(5)
    assert not seen["start"].is_alive()
