"""What a rank's process does before its model is there."""

import os
import sys

import pytest
import torch

from asyncrl.configs import load
from asyncrl.engine.lifecycle import ray_actors
from asyncrl.engine.lifecycle.ray_actors import RankActor

PRIORITY = "CUDA_MPS_CLIENT_PRIORITY"


@pytest.mark.parametrize("given", [None, "0"])
def test_kernels_of_a_rank_come_last_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    """CUDA reads it with the first tensor on a GPU, which is the model's."""
    seen: list[str | None] = []
    # Set first, so that it is as before afterwards.
    monkeypatch.setenv(PRIORITY, given or "")
    if given is None:
        monkeypatch.delenv(PRIORITY)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(ray_actors, "mark_family", lambda: None)
    monkeypatch.setattr(ray_actors, "rank_model", lambda config, index: seen.append(os.environ.get(PRIORITY)))
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    RankActor(load("default", []).config, 0, "/nowhere")
    assert seen == [given or "1"]
