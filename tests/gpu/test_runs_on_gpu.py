"""Whole runs on a GPU through the command, in one process and on Ray."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

STEPS = 120


def train(folder: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "asyncrl", "train", "--run-dir", "run", "--steps", str(STEPS)]
    devices = ["--set", "trainer.device=cuda", "--set", "collector.device=cuda"]
    done = subprocess.run(
        [*command, *devices, *arguments], check=False, cwd=folder, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))
    return summary


@pytest.mark.timeout(300)
@pytest.mark.parametrize("packed", ["null", "false"])
@pytest.mark.parametrize("precision", ["autocast", "bf16_weights"])
def test_a_run_in_one_process_learns_in_bfloat16(tmp_path: Path, packed: str, precision: str) -> None:
    options = ("model.dtype=bfloat16", f"trainer.packed={packed}", f"trainer.precision={precision}")
    summary = train(tmp_path, "--runtime", "local", *(part for option in options for part in ("--set", option)))
    assert summary["reward_last_10"] > summary["reward_first_10"] + 0.2
    started = json.loads((tmp_path / "run" / "events.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert started["config"]["trainer"]["packed"] is (packed == "null")


@pytest.mark.timeout(300)
def test_two_ranks_learn_on_ray(tmp_path: Path) -> None:
    """On one GPU, which they share, gradients are summed by gloo; on two by NCCL."""
    summary = train(tmp_path, "--set", "model.dtype=bfloat16", "--set", "trainer.packed=true")
    assert summary["reward_last_10"] > summary["reward_first_10"] + 0.2
    assert summary["data_plane_keys_left"] == 0


@pytest.mark.timeout(300)
def test_weights_reach_the_collector_of_a_shared_gpu_without_leaving_it(tmp_path: Path) -> None:
    """One rank and one collector; on a host with more GPUs they have one each, and weights go by NCCL."""
    summary = train(tmp_path, "--set", "model.dtype=bfloat16", "--set", "trainer.ranks=1")
    way = "nccl" if torch.cuda.device_count() > 1 else "cuda_ipc"
    assert f'"weight_transport": "{way}"' in (tmp_path / "run" / "log.jsonl").read_text(encoding="utf-8")
    assert summary["reward_last_10"] > summary["reward_first_10"] + 0.2
