"""AdamW over megatron's DistributedOptimizer: whose AdamW it is."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")

# In a process of its own, since what stands in for a GPU stays.
PROGRAM = """
import sys
from types import SimpleNamespace

import torch

from asyncrl.trainers.backends.megatron.cpu import prepare

prepare()
from asyncrl.trainers.backends.megatron import adam
from asyncrl.trainers.backends.megatron.settings import MegatronSettings
from asyncrl.trainers.loss.objective import Clip

class FusedAdam(torch.optim.AdamW):
    pass

weight = torch.nn.Parameter(torch.zeros(2))
kind = FusedAdam if sys.argv[1] == "other" else torch.optim.AdamW
one = SimpleNamespace(model_param_gbuf_map={weight: None}, optimizer=kind([weight]))
adam.get_megatron_optimizer = lambda *_, **__: SimpleNamespace(chained_optimizers=[one])
settings = MegatronSettings(1.0, Clip(0.2, 0.2, 3.0), (0.9, 0.95), 0.1, 1.0)
print(adam.Adam(torch.nn.Linear(1, 1), settings, dtype=torch.float32).updates)
"""


@pytest.mark.parametrize("kind", ["torch's", "other"])
def test_an_adamw_that_is_not_torchs_is_refused(kind: str) -> None:
    """Transformer Engine's, which megatron-core takes where it can import it, has one step for all weights."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind], capture_output=True, text=True, check=False, timeout=100
    )
    if kind == "other":
        assert "megatron-core has taken __main__'s AdamW in place of torch's" in done.stderr
        assert "scripts/install megatron" in done.stderr
    else:
        assert done.stdout.split() == ["0"], done.stderr
