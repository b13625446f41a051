"""Random number generators of a process: their states as data, and put back."""

import random

import numpy as np
import torch

from asyncrl.engine.errors import CheckpointBroken
from asyncrl.trainers.rank_state.index import RandomStates


def random_states(device: torch.device) -> RandomStates:
    """Return the states of torch's, Python's and NumPy's generators, and of the GPU's if `device` is one."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return RandomStates(
        torch=_hexadecimal(torch.get_rng_state()),
        cuda=_hexadecimal(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None,
        python=(version, tuple(words), gauss),
        numpy=(str(name), tuple(int(key) for key in keys), int(position), int(has_gauss), float(cached)),
    )


def restore_random(states: RandomStates, device: torch.device) -> None:
    """Put the states back; that of a GPU only if both runs have one. CheckpointBroken if a generator refuses one."""
    name, keys, position, has_gauss, cached = states.numpy
    try:
        torch.set_rng_state(_tensor(states.torch))
        if states.cuda is not None and device.type == "cuda":
            torch.cuda.set_rng_state(_tensor(states.cuda), device)
        random.setstate(states.python)
        np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    except (ValueError, TypeError, RuntimeError, ArithmeticError, LookupError) as error:
        raise CheckpointBroken(f"a saved random state cannot be restored: {error}") from error


def _hexadecimal(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _tensor(state: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(state)), dtype=torch.uint8)
