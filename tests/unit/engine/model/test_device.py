"""The device that is current where calls compute."""

from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import pytest
import torch

from asyncrl.engine.aio.blocking import in_place, in_thread
from asyncrl.engine.model.device import on_device

SECOND = torch.device("cuda", 1)


def test_calls_run_where_their_device_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a thread, which begins with the first GPU; and it is no longer the current one after an error."""
    current: list[torch.device] = []

    @contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        current.append(wanted)
        try:
            yield
        finally:
            current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    for blocking in (in_place, in_thread):
        assert anyio.run(on_device(blocking, SECOND), lambda: list(current)) == [SECOND]
        with pytest.raises(ZeroDivisionError):
            anyio.run(on_device(blocking, SECOND), lambda: 1 / 0)
        assert not current


def test_a_cpu_has_no_current_device() -> None:
    assert on_device(in_place, torch.device("cpu")) is in_place
