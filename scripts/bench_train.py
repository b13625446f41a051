#!/usr/bin/env python
"""The PyTorch trainer's steps beside plain transformers': the last line is one JSON object.

    python scripts/bench_train.py [--device cpu|cuda] [--repeats 3] [--models smollm2-135m qwen2-1.5b] [--ways …]

On a GPU: random models of SmolLM2-135M's and Qwen2-1.5B's shapes, samples of 2,048 tokens and of log-normal lengths
(256 prompt tokens), in bfloat16. A step is several micro-batches of 16,384 tokens and one AdamW update. `asyncrl` has
rows that are padded or packed, float32 weights under autocast or bfloat16 weights with float32 masters
(`trainer.precision`), and layers and a loss that are compiled or not (`trainer.compile`). `megatron` is asyncrl's
other backend with one rank, which has bfloat16 weights; where megatron-core is not installed, `missing` says so.
`plain` is transformers' own model and loss, torch's clipping and AdamW, on the same padded rows: under autocast, and
with all weights in bfloat16. `tokens_per_s` counts tokens of samples, not padding; `share_of_peak` is of the device's
bfloat16 peak; `gib` is the most memory that tensors took at a time. On a CPU: tiny models of the same kinds, in
float32.

Always: a step on a CPU with a vocabulary of 150,000, hidden size 64 and 4,096 tokens, in processes of their own.
`cpu_peak_ratio` is its peak of resident memory above the level before it, over that of a loop that keeps whole logits
in float32.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # Where torch's own types find it.
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from asyncrl.trainers.backends.base import Backend, Rows
from asyncrl.trainers.backends.megatron.backend import MegatronBackend
from asyncrl.trainers.backends.megatron.settings import MegatronSettings
from asyncrl.trainers.backends.torch_backend import TorchBackend
from asyncrl.trainers.backends.torch_settings import TorchSettings
from asyncrl.trainers.cost.model import CostModel
from asyncrl.trainers.cost.peak import peak_flops
from asyncrl.trainers.loss.objective import Clip

SMOLLM2 = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
QWEN2 = {
    "vocab_size": 151_936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32_768,
}
TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "smollm2-135m": (LlamaForCausalLM, LlamaConfig, SMOLLM2),
    "qwen2-1.5b": (Qwen2ForCausalLM, Qwen2Config, QWEN2),
}
MICRO_BATCH_TOKENS, MICRO_BATCHES, PROMPT = 16_384, 4, 256
LARGE_VOCABULARY, LARGE_TOKENS = 150_000, 4096
CLIP, BETAS = Clip(0.2, 0.2, 3.0), (0.9, 0.95)
Batch = list[list[torch.Tensor]]
Step = Callable[[Batch], None]


def build(name: str, device: torch.device) -> Any:
    kind, config, shape = MODELS[name]
    tiny = {**TINY, "num_key_value_heads": 2} if device.type == "cpu" else {}
    torch.manual_seed(0)
    with device:  # A host is slow to draw 1.5 billion random weights.
        return kind(config(**{**shape, **tiny})).eval()


def lengths_of(kind: str, scale: int) -> list[int]:
    """Return lengths of samples that fill a step, from longest to shortest, as a plan has them."""
    total = MICRO_BATCH_TOKENS * MICRO_BATCHES // scale
    if kind == "even":
        return [2048 // scale] * (total // (2048 // scale))
    random = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) < total:
        drawn = np.clip(random.lognormal(np.log(600), 0.8), PROMPT + 16, 4096)
        lengths.append(int(drawn) // scale)
    return sorted(lengths, reverse=True)


def batch_of(lengths: Sequence[int], vocabulary: int, budget: int) -> Batch:
    """Cut samples into micro-batches of at most `budget` tokens."""
    random = torch.Generator().manual_seed(0)
    batch: Batch = [[]]
    for length in lengths:
        if sum(row.shape[0] for row in batch[-1]) + length > budget and batch[-1]:
            batch.append([])
        batch[-1].append(torch.randint(2, vocabulary, (length,), generator=random))
    return batch


def rows_of(samples: Sequence[torch.Tensor], prompt: int) -> Rows:
    return Rows(
        tokens=samples,
        logprobs=[torch.full((sample.shape[0] - prompt,), -10.0) for sample in samples],
        prompt_tokens=[prompt] * len(samples),
        advantages=[(-1.0) ** i for i in range(len(samples))],
        withheld=[0] * len(samples),
        filler=False,
    )


def ours(model: Any, *, prompt: int, dtype: torch.dtype, **options: bool) -> Step:
    """Return a step of asyncrl's backend; `options` are those of TorchSettings."""
    settings = TorchSettings(1.0, CLIP, BETAS, 0.0, 1.0, **options)
    return steps_of(TorchBackend(model, settings, pad_id=0, compute_dtype=dtype), prompt)


def megatron(model: Any, *, prompt: int, dtype: torch.dtype, packed: bool) -> Step:
    """Return a step of the Megatron backend; this process is its only rank."""
    device = next(model.parameters()).device
    if not dist.is_initialized():
        store = TCPStore("127.0.0.1", 0, 1, is_master=True)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1)
    settings = MegatronSettings(1.0, CLIP, BETAS, 0.0, 1.0, packed=packed)
    # It reads the weights of a model that is elsewhere, so that the device has them once.
    weights = model.cpu().state_dict()
    return steps_of(MegatronBackend(model.config, weights, settings, pad_id=0, device=device, dtype=dtype), prompt)


def steps_of(backend: Backend, prompt: int) -> Step:
    def step(batch: Batch) -> None:
        for samples in batch:
            backend.accumulate(rows_of(samples, prompt), sum(len(row) for samples in batch for row in samples))
        backend.apply(backend.gradients(), learning_rate=1e-5)

    return step


def plain(model: Any, *, dtype: torch.dtype) -> Step:
    """transformers' forward pass and loss on padded rows, torch's clipping and AdamW."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=BETAS, fused=device.type == "cuda")
    mixed = dtype != next(model.parameters()).dtype

    def step(batch: Batch) -> None:
        for samples in batch:
            ids = torch.nn.utils.rnn.pad_sequence(list(samples), batch_first=True).to(device)
            labels = torch.nn.utils.rnn.pad_sequence(list(samples), batch_first=True, padding_value=-100).to(device)
            with torch.autocast(device.type, dtype) if mixed else nullcontext():
                loss = model(input_ids=ids, attention_mask=(labels >= 0).long(), labels=labels, use_cache=False).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measured(step: Step, batch: Batch, repeats: int, device: torch.device) -> tuple[float, float | None]:
    """Return the median seconds of a step, after one that is not counted, and GiB at the peak; None on a CPU."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        step(batch)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:]), torch.cuda.max_memory_allocated() / 2**30 if cuda else None


def ways(dtype: torch.dtype, prompt: int) -> dict[str, Callable[[Any], Step]]:
    """Return, by name, what makes a step out of a model."""

    def way(**options: bool) -> Callable[[Any], Step]:
        return lambda model: ours(model, prompt=prompt, dtype=dtype, **options)

    all_ways = {
        "asyncrl_padded": way(packed=False),
        "asyncrl_packed": way(packed=True),
        "plain_autocast": lambda model: plain(model, dtype=dtype),
    }
    for name, packed in (("padded", False), ("packed", True)):
        all_ways[f"megatron_{name}"] = partial(megatron, prompt=prompt, dtype=dtype, packed=packed)
    if dtype == torch.bfloat16:
        for name, packed in (("padded", False), ("packed", True)):
            all_ways[f"asyncrl_{name}_compiled"] = way(packed=packed, fused=True)
            all_ways[f"asyncrl_{name}_bf16_weights"] = way(packed=packed, low_weights=True)
            all_ways[f"asyncrl_{name}_bf16_weights_compiled"] = way(packed=packed, low_weights=True, fused=True)
        all_ways["plain_bfloat16_weights"] = lambda model: plain(model.to(dtype), dtype=dtype)
    return all_ways


def steps(name: str, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Return figures of one model: by kind of samples, by way."""
    cuda = device.type == "cuda"
    scale, dtype = (1, torch.bfloat16) if cuda else (64, torch.float32)
    peak = peak_flops(torch.cuda.get_device_name()) if cuda else None
    out: dict[str, Any] = {}
    for kind in options.kinds:
        lengths = lengths_of(kind, scale)
        out[kind] = {}
        for way, make in ways(dtype, PROMPT // scale).items():
            if options.ways and way not in options.ways:
                continue
            if way.startswith("megatron") and find_spec("megatron") is None:
                out[kind][way] = {"missing": "megatron-core: scripts/install megatron"}
                continue
            model = build(name, device)
            vocabulary = model.config.vocab_size
            batch = batch_of(lengths, vocabulary, options.micro_batch_tokens // scale)
            flops = float(CostModel.of(model.config).flops(np.array(lengths)).sum())
            try:
                seconds, gib = measured(make(model), batch, options.repeats, device)
                out[kind][way] = {
                    "tokens_per_s": round(sum(lengths) / seconds),
                    "share_of_peak": None if peak is None else round(flops / seconds / peak, 4),
                    "gib": None if gib is None else round(gib, 2),
                }
            except torch.OutOfMemoryError:
                out[kind][way] = {"out_of_memory": True}
            print(f"{name} {kind} {way}: {json.dumps(out[kind][way])}", flush=True)
            del model
            torch.compiler.reset()  # It holds what it compiled, and so the weights.
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()
    return out


def large_vocabulary_step(way: str) -> dict[str, float]:
    """Take one step on this process's CPU; return MB of its peak above the level before it, and seconds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = {**TINY, "vocab_size": LARGE_VOCABULARY, "num_key_value_heads": 4, "tie_word_embeddings": True}
    model = LlamaForCausalLM(LlamaConfig(**shape)).eval()
    batch = batch_of([1024] * (LARGE_TOKENS // 1024), LARGE_VOCABULARY, LARGE_TOKENS)
    step = ours(model, prompt=16, dtype=torch.float32) if way == "asyncrl" else whole_logits(model)
    step([[torch.arange(2, 40)]])
    before = resident("VmRSS")
    started = time.perf_counter()
    step(batch)
    return {"mb": round(resident("VmHWM") - before, 1), "seconds": round(time.perf_counter() - started, 2)}


def resident(which: str) -> float:
    """Return MB of this process's resident memory: now (VmRSS), or at its highest (VmHWM).

    Not getrusage's: that begins with what the process had that started this one.
    """
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{which}:"))
    return int(line.split()[1]) / 1024


def whole_logits(model: Any) -> Step:
    """The loop that a textbook has: all logits in float32, a table of their log-softmax, the chosen out of it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step(batch: Batch) -> None:
        for samples in batch:
            ids = torch.stack(list(samples))
            logits = model(input_ids=ids, use_cache=False).logits.float()
            table = torch.log_softmax(logits[:, :-1], dim=-1)
            logprobs = table.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
            ratio = (logprobs - logprobs.detach()).exp()
            (-ratio[:, 15:].mean()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def cpu_peaks() -> dict[str, Any]:
    """Take the step with a large vocabulary in two processes, one after the other."""
    found: dict[str, Any] = {}
    for way in ("asyncrl", "whole_logits"):
        command = [sys.executable, __file__, "--large-vocabulary", way]
        said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
        found[way] = json.loads(said.splitlines()[-1])
    return {"cpu_peak_ratio": round(found["asyncrl"]["mb"] / found["whole_logits"]["mb"], 4), "cpu_peak": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=3, help="steps of each way; their median counts")
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    parser.add_argument("--ways", nargs="+", choices=list(ways(torch.bfloat16, 1)), help="these alone; default: all")
    parser.add_argument("--kinds", nargs="+", choices=("even", "lognormal"), default=["even", "lognormal"])
    parser.add_argument("--micro-batch-tokens", type=int, default=MICRO_BATCH_TOKENS, help="on a GPU")
    parser.add_argument("--large-vocabulary", choices=("asyncrl", "whole_logits"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.large_vocabulary:
        print(json.dumps(large_vocabulary_step(options.large_vocabulary)))
        return
    device = torch.device(options.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    models = {name: steps(name, device, options) for name in options.models}
    print(json.dumps({"device": name, "torch": torch.__version__, "models": models, **cpu_peaks()}))


if __name__ == "__main__":
    main()
