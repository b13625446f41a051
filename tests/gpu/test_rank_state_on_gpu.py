"""A backend on a GPU that is saved, and loaded into a fresh one, continues bit for bit."""

from pathlib import Path

import torch

from asyncrl.engine.lifecycle.parts import build_run_model
from asyncrl.engine.testing.simulation import simulated_config
from asyncrl.trainers.backends.torch_backend import TorchBackend
from asyncrl.trainers.backends.torch_settings import TorchSettings
from asyncrl.trainers.loss.objective import Clip
from asyncrl.trainers.rank_state.keeper import StateKeeper

DEVICE = "cuda"
SETTINGS = TorchSettings(1.0, Clip(0.2, 0.3, 3.0), (0.9, 0.95), 0.1, 1.0, reference_kl=0.1)


def seeded_backend(seed: int) -> TorchBackend:
    """Return one of equal weights, and seed the random numbers."""
    model = build_run_model(simulated_config()).to(DEVICE)
    torch.manual_seed(seed)
    return TorchBackend(model, SETTINGS, pad_id=0, compute_dtype=torch.bfloat16)


def update(backend: TorchBackend) -> None:
    """Take an update by gradients from the device's random numbers."""
    backend.apply(torch.rand_like(backend.gradients()), learning_rate=0.01)


def test_a_saved_backend_continues_bit_for_bit_on_a_gpu(tmp_path: Path) -> None:
    """Weights, moments, reference, and the GPU's random numbers; an update beside the save changes none of them."""
    whole = seeded_backend(1)
    for _ in range(3):
        update(whole)
    first, keeper = seeded_backend(1), StateKeeper(0, 1)
    update(first)
    keeper.hold(first, 1)
    update(first)
    keeper.save(tmp_path)
    second = seeded_backend(2)
    update(second)
    second.freeze_reference()
    assert StateKeeper(0, 1).load(tmp_path, second) == 1
    update(second)
    update(second)
    expected, found = whole.training_state().saved, second.training_state().saved
    assert expected.keys() == found.keys()
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []
