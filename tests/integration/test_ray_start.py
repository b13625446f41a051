"""A Ray that does not start: an error that another attempt may follow, and nothing left of it."""

from contextlib import nullcontext
from typing import Any

import anyio
import pytest

from asyncrl.engine.errors import Overdue
from asyncrl.engine.lifecycle import ray_runtime


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("The current node timed out during startup. The GCS may be overloaded.", Overdue),
        ("no permission", RuntimeError),
    ],
)
def test_a_start_that_takes_too_long_is_overdue_and_cleaned_up(
    said: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []

    def refuse(**options: Any) -> None:
        raise RuntimeError(said)

    async def start() -> None:
        async with ray_runtime.ray_cluster():
            raise AssertionError("it started")

    monkeypatch.setattr("ray.init", refuse)
    # What it ends is all of Ray in this process, and the tests share one.
    monkeypatch.setattr(ray_runtime, "_end_ray", lambda: ended.append(True))
    monkeypatch.setattr(ray_runtime, "ray_token", nullcontext)
    with pytest.raises(kind, match="GCS may be overloaded" if kind is Overdue else said):
        anyio.run(start)
    assert ended == [True]
