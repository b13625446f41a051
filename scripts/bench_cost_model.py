#!/usr/bin/env python
"""Measured step times against the cost model: the last line is one JSON object.

    python scripts/bench_cost_model.py [--device cpu|cuda]

On a CPU: forward and backward of one sample, for small Llamas of a few sizes, one thread. On a GPU (the default
where there is one): forward and backward of packed rows of samples of 512 to 16,384 tokens, in bfloat16, through a
Llama of 1.3 billion random weights with grouped-query heads; it needs torch and transformers, and no network.

Scale and overhead are fitted to a model's times: `correlation` is of predicted FLOPs with seconds over all of them,
`max_relative_error` after the fit, and `max_relative_error_held_out` of rows that the fit did not see. A time is the
median of `--repeats` runs after one that is not counted.
`share_of_peak` is what the largest row reaches.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from asyncrl.trainers.backends.packing import Packing, has_varlen, use_varlen
from asyncrl.trainers.cost.model import CostModel
from asyncrl.trainers.cost.peak import peak_flops

SIZES = ((256, 8, 2, 688), (512, 8, 4, 1376), (768, 12, 12, 2048))
"""Hidden size, heads, key-value heads, width of the feed-forward layers."""
LENGTHS = (128, 256, 384, 512, 768, 1024, 1536, 2048)
LARGE = (2048, 16, 4, 8192)
ROWS = (
    [512] * 8,
    [2048] * 2,
    [4096],
    [512, 1024, 2560, 2048],
    [512] * 16,
    [1024] * 8,
    [8192],
    [4096, 2048, 1024, 512, 512],
    [512] * 24,
    [6144] * 2,
    [12_288],
    [8192, 2048, 1024, 1024],
    [512] * 32,
    [2048] * 8,
    [4096] * 4,
    [8192] * 2,
    [16_384],
    [8192, 4096, 2048, 1024, 512, 512],
)
"""Lengths of the samples of each packed row on a GPU."""

Pairs = list[tuple[float, float]]
"""FLOPs and seconds of each row."""
Line = tuple[float, float]
"""Seconds per FLOP, and overhead in seconds."""
"""Of each row or length: predicted FLOPs, measured seconds."""


def build(shape: tuple[int, int, int, int], *, layers: int, vocabulary: int, device: str, dtype: torch.dtype) -> Any:
    """Return a Llama of random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, heads, shared, width = shape
    config = LlamaConfig(
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        intermediate_size=width,
        num_hidden_layers=layers,
        vocab_size=vocabulary,
        max_position_embeddings=32_768,
    )
    with torch.device(device):
        return LlamaForCausalLM(config).to(dtype)


def step(model: Any, lengths: Sequence[int]) -> Callable[[], None]:
    """Return a forward and backward over samples in one row; the loss is the mean of the next tokens'."""
    weight = model.lm_head.weight
    ids = torch.randint(0, weight.shape[0], (1, sum(lengths)), device=weight.device)
    arguments = (
        Packing(lengths).arguments(weight.device, weight.dtype) if has_varlen(weight.device, weight.dtype) else {}
    )

    def run() -> None:
        model.zero_grad()
        logits = model(input_ids=ids, use_cache=False, **arguments).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        if weight.is_cuda:
            torch.cuda.synchronize()

    return run


def median_s(run: Callable[[], None], repeats: int) -> float:
    """Return the median time of a few; the first is left out."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def fit(pairs: Pairs) -> Line:
    """Fit seconds per FLOP and overhead: least squares of the relative error, neither below zero."""
    flops, seconds = np.array(pairs).T
    slope, rest = flops / seconds, 1 / seconds
    unit = slope.mean()
    scaled, overhead = np.linalg.lstsq(np.stack([slope / unit, rest], 1), np.ones(len(pairs)), rcond=None)[0]
    if overhead >= 0 and scaled > 0:
        return float(scaled / unit), float(overhead)
    return float(slope.sum() / (slope @ slope)), 0.0


def relative_errors(line: Line, pairs: Pairs) -> list[float]:
    per_flop, overhead_s = line
    return [abs((overhead_s + per_flop * flops) / seconds - 1) for flops, seconds in pairs]


def figures(measured: dict[str, Pairs]) -> dict[str, Any]:
    """Fit scale and overhead to the times of every model."""
    everything = [pair for pairs in measured.values() for pair in pairs]
    fitted = {name: fit(pairs) for name, pairs in measured.items()}
    errors = [error for name, pairs in measured.items() for error in relative_errors(fitted[name], pairs)]
    held_out = [error for pairs in measured.values() for error in relative_errors(fit(pairs[::2]), pairs[1::2])]
    return {
        "correlation": round(float(np.corrcoef(np.array(everything).T)[0, 1]), 5),
        "max_relative_error": round(max(errors), 4),
        "mean_relative_error": round(float(np.mean(errors)), 4),
        "max_relative_error_held_out": round(max(held_out), 4),
        "fits": {
            name: {"gflop_per_s": round(1e-9 / per_flop, 2), "overhead_ms": round(1000 * overhead_s, 3)}
            for name, (per_flop, overhead_s) in fitted.items()
        },
    }


def on_cpu(repeats: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    measured = {}
    for shape in SIZES:
        model = build(shape, layers=2, vocabulary=1000, device="cpu", dtype=torch.float32)
        flops = CostModel.of(model.config).flops(np.array(LENGTHS)).tolist()
        measured[str(shape[0])] = [
            (f, median_s(step(model, [n]), repeats)) for n, f in zip(LENGTHS, flops, strict=True)
        ]
    return {"device": "cpu", **figures(measured)}


def on_gpu(repeats: int) -> dict[str, Any]:
    name = torch.cuda.get_device_name()
    model = build(LARGE, layers=20, vocabulary=32_000, device="cuda", dtype=torch.bfloat16)
    use_varlen(model)
    cost = CostModel.of(model.config)
    median_s(step(model, ROWS[0]), 3)
    pairs = [(float(cost.flops(np.array(row)).sum()), median_s(step(model, row), repeats)) for row in ROWS]
    for row, (flops, seconds) in zip(ROWS, pairs, strict=True):
        print(f"{len(row):>3} samples, {sum(row):>6} tokens: {flops / 1e12:8.2f} TFLOP {1000 * seconds:8.2f} ms")
    peak = peak_flops(name)
    flops, seconds = pairs[-1]
    return {
        "device": name,
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "peak_flops": peak,
        "share_of_peak": None if peak is None else round(flops / (seconds * peak), 4),
        **figures({str(LARGE[0]): pairs}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="of each row; their median counts")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(json.dumps(on_gpu(options.repeats) if options.device == "cuda" else on_cpu(options.repeats)))


if __name__ == "__main__":
    main()
