"""Whole `asyncrl train` runs on Megatron: they learn the default task, leave nothing, and replay."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.engine.events.log import read_events
from asyncrl.engine.events.types import Planned, RunEnded

# Minutes each: several processes import megatron-core.
pytestmark = pytest.mark.soak


def command(folder: Path, *words: str, timeout_s: float = 500) -> "subprocess.CompletedProcess[str]":
    started = [sys.executable, "-m", "asyncrl", *words]
    return subprocess.run(started, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False)


def train_words(**settings: Any) -> list[str]:
    named = {"trainer.backend": "megatron", "supervision.start_timeout_s": 240, **settings}
    return ["train", "--max-staleness", "2", *(word for key in named for word in ("--set", f"{key}={named[key]}"))]


def summary_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("tensor", "replicas"), [(1, 2), (2, 1)], ids=["DP 2", "TP 2"])
def test_a_run_learns_the_default_task(tensor: int, replicas: int, tmp_path: Path) -> None:
    """Two ranks: the ledger is exact, every decision replays, and what it learned is a whole model."""
    options = {"trainer.tensor_parallel": tensor, "run.stop_at_reward": 0.3}
    done = command(tmp_path, *train_words(**options), "--run-dir", "run")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = summary_of(tmp_path / "run")
    assert summary["exit"]["reason"] == "reward reached"
    assert summary["reward_first_10"] < 0.1 < summary["reward_last_10"]
    assert (summary["data_plane_keys_left"], summary["model"]["failed_saves"]) == (0, 0)
    planned = {len(event.ranks) for event in read_events(tmp_path / "run") if isinstance(event, Planned)}
    assert planned == {replicas}
    for words in (("ledger", "run"), ("replay", "run")):
        asked = command(tmp_path, *words)
        assert asked.returncode == 0, asked.stdout + asked.stderr
    answered = command(tmp_path, "generate", "run", "7>")
    assert answered.returncode == 0, answered.stderr


@pytest.mark.timeout(400)
def test_a_mixture_with_its_experts_divided_learns_with_their_choices_replayed(
    tmp_path: Path, save_checkpoint: Any
) -> None:
    from transformers import Qwen3MoeConfig

    folder = save_checkpoint(
        Qwen3MoeConfig(
            vocab_size=15,
            hidden_size=32,
            intermediate_size=32,
            moe_intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            eos_token_id=1,
            bos_token_id=None,
            pad_token_id=None,
        )
    )
    options = {
        "model.path": str(folder),
        "trainer.expert_parallel": 2,
        "trainer.router_replay": "true",
        "trainer.learning_rate": 0.003,
        "trainer.sft_warm_up_steps": 30,
        "rollout.groups_per_step": 4,
        "run.batches": 40,
    }
    done = command(tmp_path, *train_words(**options), "--run-dir", "run", timeout_s=380)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = summary_of(tmp_path / "run")
    assert summary["reward_last_10"] > summary["reward_first_10"] + 0.1, done.stdout
    assert summary["data_plane_keys_left"] == 0


@pytest.mark.timeout(400)
def test_a_run_goes_on_from_its_checkpoint_with_its_tensors_divided(tmp_path: Path) -> None:
    """From one rank to two that share the replica, and its ledger stays exact."""
    options = {"run.steps": 2, "trainer.ranks": 1, "trainer.sft_warm_up_steps": 20}
    first = command(tmp_path, *train_words(**options), "--run-dir", "run")
    assert first.returncode == 0, first.stdout[-3000:] + first.stderr[-3000:]
    more = ("run.steps=4", "trainer.ranks=2", "trainer.tensor_parallel=2")
    words = ["train", "--resume", "run", *(word for each in more for word in ("--set", each))]
    second = command(tmp_path, *words)
    assert second.returncode == 0, second.stdout[-3000:] + second.stderr[-3000:]
    assert summary_of(tmp_path / "run")["steps"] == 4
    for words in (["ledger", "run"], ["replay", "run"]):
        asked = command(tmp_path, *words)
        assert asked.returncode == 0, asked.stdout + asked.stderr


@pytest.mark.timeout(300)
def test_a_sibling_that_dies_ends_the_run_in_seconds_by_its_name(tmp_path: Path) -> None:
    options = {"trainer.tensor_parallel": 2, "supervision.run_restarts": 0, "trainer.sft_warm_up_steps": 20}
    started = [sys.executable, "-m", "asyncrl", *train_words(**options), "--run-dir", "run"]
    log = tmp_path / "run" / "events.jsonl"
    with subprocess.Popen(started, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        deadline = time.monotonic() + 200
        while not (log.exists() and '"step_ended"' in log.read_text(encoding="utf-8", errors="replace")):
            assert run.poll() is None, run.stdout.read() if run.stdout else ""
            assert time.monotonic() < deadline
            time.sleep(0.2)
        ranks = [p for p in psutil.Process(run.pid).children(recursive=True) if "RankActor" in " ".join(p.cmdline())]
        ranks[1].kill()
        killed = time.monotonic()
        said, _ = run.communicate(timeout=60)
    assert time.monotonic() - killed < 30
    assert run.returncode == 1
    ended = list(read_events(tmp_path / "run"))[-1]
    assert isinstance(ended, RunEnded)
    assert "rank" in ended.reason, said
    assert "died" in ended.reason
