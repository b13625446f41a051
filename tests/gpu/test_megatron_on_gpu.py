"""Megatron on one GPU: padded and packed, against the PyTorch backend in float64 on the CPU; and a whole run.

Needs megatron-core. Ranks that share a replica need a GPU each (NCCL), so tests/megatron has them on a CPU.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # Where torch's own types find it.
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.trainers.backends.base import Rows
from asyncrl.trainers.backends.megatron.backend import MegatronBackend
from asyncrl.trainers.backends.megatron.settings import MegatronSettings
from asyncrl.trainers.backends.torch_backend import TorchBackend
from asyncrl.trainers.backends.torch_settings import TorchSettings
from asyncrl.trainers.loss.objective import Clip

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")

LENGTHS, PROMPT, VOCABULARY = (90, 3, 257, 64, 1024, 31), 2, 64
TOTAL = sum(LENGTHS) - PROMPT * len(LENGTHS)
CLIP, BETAS = Clip(0.2, 0.3, 3.0), (0.9, 0.95)


@pytest.fixture(scope="module")
def joined() -> Iterator[None]:
    """A process group of this process alone, and megatron's groups in it."""
    dist.init_process_group("nccl", store=TCPStore("127.0.0.1", 0, 1, is_master=True), rank=0, world_size=1)
    yield
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def qwen3() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        shape = Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=2048,
        )
        return Qwen3ForCausalLM(shape).double().eval()


def rows(logprobs: list[torch.Tensor]) -> Rows:
    draw = torch.Generator().manual_seed(1)
    return Rows(
        tokens=[torch.randint(1, VOCABULARY, (length,), generator=draw) for length in LENGTHS],
        logprobs=logprobs,
        prompt_tokens=[PROMPT] * len(LENGTHS),
        advantages=[(-1.0) ** i * (1 + i) for i in range(len(LENGTHS))],
        withheld=[0] * len(LENGTHS),
        filler=False,
    )


@pytest.mark.usefixtures("joined")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)], ids=["float32", "bfloat16"]
)
def test_logprobs_loss_and_gradient_are_those_of_float64(
    packed: bool, dtype: torch.dtype, bound: float, recompute: bool
) -> None:
    """Gradients are those that AdamW's first moment holds. Packed rows in bfloat16 go through the kernel."""
    model = qwen3()
    exact = TorchBackend(model, TorchSettings(1.0, CLIP, BETAS, 0.0, 1e9), pad_id=0)
    right = exact.logprobs(rows([]))
    draw = torch.Generator().manual_seed(2)
    sampled = [values + 0.1 * torch.randn(values.shape, generator=draw, dtype=values.dtype) for values in right]
    settings = MegatronSettings(1.0, CLIP, BETAS, 0.0, 1e9, packed=packed, recompute=recompute)
    weights = {name: value.float() for name, value in model.state_dict().items()}
    ours = MegatronBackend(model.config, weights, settings, pad_id=0, device=torch.device("cuda"), dtype=dtype)
    found = ours.logprobs(rows([]))
    torch.testing.assert_close(torch.cat(found).double(), torch.cat(right), rtol=0, atol=bound)
    expected = exact.accumulate(rows(sampled), TOTAL).read()
    sums = ours.accumulate(rows([values.float() for values in sampled]), TOTAL).read()
    assert sums.tokens == expected.tokens == TOTAL
    assert sums.loss == pytest.approx(expected.loss, abs=bound * 10)
    norms = [backend.apply(backend.gradients(), learning_rate=1e-4) for backend in (ours, exact)]
    assert norms[0] == pytest.approx(norms[1], rel=bound * 4)
    moments, gaps, sizes = ours.training_state().tensors, 0.0, 0.0
    for name, value in exact.training_state().tensors.items():
        if name.startswith("optimizer/exp_avg/"):
            gaps += float((moments[name].double() - value).square().sum())
            sizes += float(value.square().sum())
    assert (gaps / sizes) ** 0.5 < bound * 4
    for name, value in exact.state().items():
        torch.testing.assert_close(ours.state()[name].double().cpu(), value, rtol=0, atol=bound)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_of_one_rank_learns(tmp_path: Path, dtype: str) -> None:
    options = (
        "trainer.backend=megatron",
        "trainer.ranks=1",
        "trainer.device=cuda",
        "collector.device=cuda",
        f"model.dtype={dtype}",
    )
    command = [sys.executable, "-m", "asyncrl", "train", "--run-dir", "run", "--steps", "120"]
    words = [*command, *(part for option in options for part in ("--set", option))]
    done = subprocess.run(words, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["reward_last_10"] > summary["reward_first_10"] + 0.2
    assert summary["data_plane_keys_left"] == 0
