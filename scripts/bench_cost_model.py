#!/usr/bin/env python
"""Step times of small Llamas on this CPU against the cost model: one JSON line.

Times forward and backward of one sample for a few sizes and lengths, one thread. A model's lengths are fitted
(scale and overhead); `correlation` is over all of them, `max_relative_error` after a fit for each size, and
`max_relative_error_held_out` of lengths that the fit did not see.
"""

import argparse
import json
import time

import numpy as np
import torch

from asyncrl.trainers.cost_model import CostModel

SIZES = ((256, 8, 2, 688), (512, 8, 4, 1376), (768, 12, 12, 2048))
"""Hidden size, heads, key-value heads, width of the feed-forward layers."""
LENGTHS = (128, 256, 384, 512, 768, 1024, 1536, 2048)


def step_s(model: torch.nn.Module, tokens: int, repeats: int) -> float:
    """Return the shortest time of a forward and backward on one sample."""
    row = torch.randint(0, 1000, (1, tokens))
    times = []
    for _ in range(repeats + 1):
        model.zero_grad()
        start = time.perf_counter()
        model(input_ids=row, labels=row, use_cache=False).loss.backward()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def relative_errors(model: CostModel, pairs: list[tuple[float, float]]) -> list[float]:
    return [abs(model.seconds(flops) / seconds - 1) for flops, seconds in pairs]


def main() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="of each length; the shortest counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    everything, errors, held_out, fits = [], [], [], {}
    for hidden, heads, shared, width in SIZES:
        config = LlamaConfig(
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=shared,
            intermediate_size=width,
            num_hidden_layers=2,
            vocab_size=1000,
        )
        model = LlamaForCausalLM(config)
        cost = CostModel.of(config)
        flops = cost.flops(np.array(LENGTHS)).tolist()
        pairs = [(f, step_s(model, n, options.repeats)) for n, f in zip(LENGTHS, flops, strict=True)]
        fitted = cost.refit(pairs)
        everything += pairs
        errors += relative_errors(fitted, pairs)
        held_out += relative_errors(cost.refit(pairs[::2]), pairs[1::2])
        fits[str(hidden)] = {
            "gflop_per_s": round(1e-9 / fitted.seconds_per_flop, 2),
            "overhead_ms": round(1000 * fitted.overhead_s, 3),
        }
    figures = {
        "correlation": round(float(np.corrcoef(np.array(everything).T)[0, 1]), 5),
        "max_relative_error": round(max(errors), 4),
        "mean_relative_error": round(float(np.mean(errors)), 4),
        "max_relative_error_held_out": round(max(held_out), 4),
        "fits": fits,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
