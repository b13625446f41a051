"""Engine and backend leave a GPU to each other: its memory falls, tokens and steps are as without, and a run learns."""

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from asyncrl.collectors.engines.native import NativeEngine
from asyncrl.collectors.engines.settings import NativeSettings
from asyncrl.configs.sections.model import Model
from asyncrl.engine.aio.blocking import in_thread
from asyncrl.engine.model.causal_lm import build_model
from asyncrl.engine.testing.conformance.engine_contract import SLEEP
from asyncrl.engine.testing.conformance.engine_trials import native_trial, serving, tiny_model
from asyncrl.engine.testing.simulation import simulated_config
from asyncrl.trainers.backends.torch_backend import TorchBackend
from asyncrl.trainers.backends.torch_settings import TorchSettings
from asyncrl.trainers.loss.objective import Clip

MIB = 1 << 20
CACHE = 512 * MIB


def reserved() -> int:
    """Return what this process has of the GPU, as other processes see it."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_reserved()


def large_model() -> Any:
    """Return a model of some 50 million weights."""
    base: Model = simulated_config().model
    shape = base.model_copy(update={"hidden_size": 768, "intermediate_size": 2048, "layers": 6, "heads": 12})
    return build_model(shape, vocab_size=1024, seed=0).to("cuda")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("graphs", [True, False])
def test_the_contract_of_sleep_holds(graphs: bool) -> None:
    async def held() -> None:
        with anyio.fail_after(300.0):
            async with native_trial(device="cuda", length=256, graphs=graphs) as trial:
                for test in SLEEP:
                    await test(trial)

    anyio.run(held)


@pytest.mark.timeout(200)
def test_an_engine_asleep_has_neither_weights_nor_cache_on_the_gpu() -> None:
    async def main() -> tuple[int, int, int]:
        settings = NativeSettings(1024, 1024, CACHE)
        engine = NativeEngine(tiny_model("llama", 0).to("cuda"), settings, blocking=in_thread)
        async with serving(engine):
            awake = reserved()
            await engine.sleep()
            asleep = reserved()
            await engine.wake()
            return awake, asleep, reserved()

    torch.cuda.empty_cache()  # Else what earlier tests have left would be taken first.
    before = reserved()
    awake, asleep, again = anyio.run(main)
    assert awake - before >= CACHE // 2
    assert asleep - before < 64 * MIB
    assert again - asleep >= CACHE // 2


@pytest.mark.timeout(200)
def test_a_backend_asleep_has_neither_weights_nor_moments_on_the_gpu() -> None:
    torch.cuda.empty_cache()  # Else what earlier tests have left would be taken first.
    before = reserved()
    settings = TorchSettings(1.0, Clip(0.2, 0.3, 3.0), (0.9, 0.95), 0.1, 1.0, reference_kl=0.1)
    backend = TorchBackend(large_model(), settings, pad_id=0, compute_dtype=torch.bfloat16)
    backend.apply(torch.rand_like(backend.gradients()), learning_rate=0.01)
    weights = sum(tensor.nbytes for tensor in backend.state().values()) * 2  # They are given in bfloat16.
    awake = reserved()
    expected = {name: tensor.cpu().clone() for name, tensor in backend.training_state().saved.items()}
    backend.sleep()
    assert awake - before > 4 * weights  # Weights, reference and two moments.
    assert reserved() - before < weights // 2
    assert {tensor.device.type for tensor in backend.training_state().saved.values()} == {"cpu"}
    backend.wake()
    for name, tensor in backend.training_state().saved.items():
        assert tensor.is_cuda, name
        assert torch.equal(tensor.cpu(), expected[name]), name


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("runtime", "slicing"), [("local", "keep"), ("ray", "recompute")])
def test_a_run_in_turns_learns_on_one_gpu(tmp_path: Path, runtime: str, slicing: str) -> None:
    options = ("trainer.device=cuda", "collector.device=cuda", "trainer.ranks=1", f"cluster.time_slicing={slicing}")
    command = [sys.executable, "-m", "asyncrl", "train", "--run-dir", "run", "--steps", "120", "--runtime", runtime]
    words = [*command, *(part for option in options for part in ("--set", option))]
    done = subprocess.run(words, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["reward_last_10"] > summary["reward_first_10"] + 0.2
    assert summary["data_plane_keys_left"] == 0
