"""No model is made before one thread has had MKL choose its functions: else cosines may be off by 1.5e-4."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from asyncrl.configs import Override, load
from asyncrl.engine.model import causal_lm, checkpoint
from asyncrl.engine.model.causal_lm import build_model
from asyncrl.engine.model.tokenizer import CharTokenizer

TABLE = """
import torch
from asyncrl.engine.model.vector_math import settle_vector_math
torch.set_num_threads(2)
settle_vector_math()
angles = torch.outer(torch.arange(1024.0), 10000.0 ** (-torch.arange(0.0, 32.0, 2.0) / 32))
print((angles.cos() - angles.double().cos()).abs().max().item())
"""


@pytest.mark.parametrize("where", ["small", "folder"])
def test_one_thread_calls_first(where: str, llama_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    made = transformers.LlamaForCausalLM.__init__

    def make(self: Any, config: Any) -> None:
        order.append("model")
        made(self, config)

    for module in (causal_lm, checkpoint):
        monkeypatch.setattr(module, "settle_vector_math", lambda: order.append("settled"))
    monkeypatch.setattr(transformers.LlamaForCausalLM, "__init__", make)
    path = None if where == "small" else str(llama_checkpoint)
    config = load("default", [Override("model.path", path, "test")]).config.model
    build_model(config, vocab_size=CharTokenizer.vocab_size, seed=0)
    assert order[0] == "settled"
    assert "model" in order


@pytest.mark.long
def test_a_table_of_cosines_is_exact_in_each_process() -> None:
    """Without the first call, 4 of 60 processes were off: 30 of them find it out in seven of eight runs."""
    for _ in range(30):
        done = subprocess.run([sys.executable, "-c", TABLE], capture_output=True, text=True, check=True, timeout=60)
        assert float(done.stdout) < 1e-6
