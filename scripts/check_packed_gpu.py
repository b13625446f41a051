"""Packed rows on a GPU: the varying-length kernel against samples run one at a time, and its time against a mask.

    python scripts/check_packed_gpu.py

Prints one JSON object: the largest difference of log-probabilities and gradients, and milliseconds.
"""

import copy
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from asyncrl.trainers.backends.packing import Packing, has_varlen, use_varlen

LENGTHS = [512, 700, 33, 1, 2048, 900, 64, 1500, 300, 128]
MANY = LENGTHS * 4


def build(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=1000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(shape).to("cuda", dtype).eval()


def logits(model: Any, ids: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
    out: torch.Tensor = model(input_ids=ids.unsqueeze(0), use_cache=False, **arguments).logits[0].float()
    return out


def gradient(model: Any, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.float().reshape(-1) for p in model.parameters()])


def milliseconds(run: Callable[[], Any]) -> float:
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(10):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) * 100


def main() -> None:
    device, dtype = torch.device("cuda", 0), torch.bfloat16
    assert has_varlen(device, dtype)
    plain = build(dtype)
    packed = copy.deepcopy(plain)
    use_varlen(packed)
    exact = copy.deepcopy(plain).float()
    packing = Packing(LENGTHS)
    ids = torch.randint(0, 1000, (sum(LENGTHS),), device=device)
    bounds = packing.arguments(device, dtype)
    alone = torch.cat([logits(plain, row, {}) for row in packing.split(ids)])
    right = torch.cat([logits(exact, row, {}) for row in packing.split(ids)])
    found = logits(packed, ids, bounds)
    weights = torch.randn_like(found)
    one = gradient(packed, (found * weights).sum())
    two = gradient(plain, (alone * weights).sum())
    true = gradient(exact, (right * weights).sum())

    many = Packing(MANY)
    long = torch.randint(0, 1000, (sum(MANY),), device=device)
    mask = many.arguments(device, torch.float32)
    mask["attention_mask"] = mask["attention_mask"].to(dtype)

    def step(model: Any, arguments: dict[str, Any]) -> Callable[[], Any]:
        return lambda: logits(model, long, arguments).sum().backward()  # type: ignore[no-untyped-call]

    print(
        json.dumps(
            {
                "device": torch.cuda.get_device_name(0),
                "torch": torch.__version__,
                "packed_error": float((found - right).detach().abs().max()),
                "alone_error": float((alone - right).detach().abs().max()),
                "packed_gradient_error": float((one - true).norm() / true.norm()),
                "alone_gradient_error": float((two - true).norm() / true.norm()),
                "varlen_ms": milliseconds(step(packed, many.arguments(device, dtype))),
                "mask_ms": milliseconds(step(plain, mask)),
            }
        )
    )


if __name__ == "__main__":
    main()
