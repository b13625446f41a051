#!/usr/bin/env python
"""The native engine beside transformers' own generation: the last line is one JSON object.

A model of SmolLM2-135M's shape with random weights; requests come in groups of 16 with one prompt each, as in a run;
no token ends a response early. All get the same prompts, lengths, precision and threads, in one process, and are
warmed up before they are timed. Tokens count if they were asked for: what `generate` pads behind a shorter answer
does not.

On a GPU, per number of rows: `native_tok_s`, `transformers_tok_s` (`generate`) and `transformers_static_tok_s` (with
its static cache, which it compiles), 256 new tokens each at 128 rows; `_512` at 512 rows; `_spread` with lengths drawn
log-normally at 128 rows, four times as many requests as rows. On a CPU: 64 requests of log-normal lengths (mean 64,
sigma 0.8, at most 256), 16 rows for both; `cpu_ratio` is native over `generate` by the clock, `cpu_ratio_processor` by
processor time, which what else the machine does hardly touches.
`share_of_memory_bandwidth` is what a step must read (weights, and cached keys and values) per second over what a copy
of a large tensor moves. `pause_ms` is the median pause of `--updates` updates under load, staging apart;
`stop_the_world_ms` what it takes, under the same load, to drain, swap and resume.

On a CPU also two whole runs, on Ray (generation_in_runs.py). `sync_ratio`: a step at S = 0 of 16 groups of 16, over its
generation and its training timed alone. `busy_share`: the share of the time in which the engine is busy in the preset
`long_tail` at S = 2, with the share of the time that the trainer waits, which is not 0 where generation is the slower
side, and the pause of an update there.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import numpy as np
import torch
from generation_in_runs import busy_share, sync_ratio

from asyncrl.collectors.engines.base import Request, Result, Sampling
from asyncrl.collectors.engines.native import NativeEngine
from asyncrl.collectors.engines.settings import NativeSettings
from asyncrl.engine.aio.blocking import in_thread

GROUP = 16
VOCABULARY = 49152
SMOLLM2_135M: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


@dataclass(frozen=True)
class Load:
    """Requests: one prompt per group of 16, and a length each."""

    prompts: list[list[int]]
    lengths: list[int]
    rows: int

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        return len(self.prompts[0]) + max(self.lengths)

    def requests(self) -> list[Request]:
        return [
            Request(str(i), tuple(prompt), Sampling(length), seed=i, group=str(i // GROUP), stream=False)
            for i, (prompt, length) in enumerate(zip(self.prompts, self.lengths, strict=True))
        ]


def load(count: int, rows: int, prompt_tokens: int, *, fixed: int = 0, seed: int = 0) -> Load:
    """Return `count` requests of `fixed` new tokens each, or log-normally many."""
    random = np.random.default_rng(seed)
    groups = random.integers(3, VOCABULARY, (-(-count // GROUP), prompt_tokens)).tolist()
    sigma = 0.8
    drawn = random.lognormal(np.log(64) - sigma**2 / 2, sigma, count)
    lengths = [fixed] * count if fixed else np.clip(np.rint(drawn), 1, 256).astype(int).tolist()
    return Load([groups[i // GROUP] for i in range(count)], lengths, rows)


def build(device: torch.device, dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMOLLM2_135M)).eval().to(device=device, dtype=dtype)


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@torch.inference_mode()
def transformers_pass(model: Any, work: Load, device: torch.device, *, static: bool) -> tuple[float, float]:
    """Return seconds, by clock and by processor, of padded generation, `rows` requests at a time."""
    sync(device)
    started, processor = time.perf_counter(), time.process_time()
    for first in range(0, len(work.lengths), work.rows):
        ids = torch.tensor(work.prompts[first : first + work.rows], device=device)
        more = {"cache_implementation": "static"} if static else {}
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max(work.lengths[first : first + work.rows]),
            **more,
        )
    sync(device)
    return time.perf_counter() - started, time.process_time() - processor


@asynccontextmanager
async def serving(engine: NativeEngine) -> Any:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.run)
        yield engine
        tasks.cancel_scope.cancel()


async def ask(engine: NativeEngine, requests: Sequence[Request]) -> None:
    async def one(request: Request) -> None:
        async for item in engine.generate(request):
            assert isinstance(item, Result), item
            assert item.finish in ("length", "abort"), item

    async with anyio.create_task_group() as tasks:
        for request in requests:
            tasks.start_soon(one, request)


def native_engine(model: Any, work: Load, options: argparse.Namespace) -> NativeEngine:
    settings = NativeSettings(
        rows=work.rows,
        length=work.longest,
        cache_bytes=options.cache_gb * 10**9,
        burst=options.burst,
        graphs=not options.no_graphs,
        compiled=not options.no_compile and next(model.parameters()).is_cuda,
    )
    return NativeEngine(model, settings, blocking=in_thread)


async def native_pass(engine: NativeEngine, work: Load, device: torch.device) -> tuple[float, float]:
    sync(device)
    started, processor = time.perf_counter(), time.process_time()
    await ask(engine, work.requests())
    sync(device)
    return time.perf_counter() - started, time.process_time() - processor


async def pauses(engine: NativeEngine, model: Any, work: Load, updates: int) -> tuple[float, float]:
    """Return milliseconds of an update's pause, and of draining, swapping and resuming, under the same load."""
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, engine, work.requests())
        # An engine tells what it does only when asked.
        while not (await engine.stats()).tokens:  # noqa: ASYNC110
            await anyio.sleep(0.01)
        version = (await engine.stats()).version
        taken = [(await engine.update_weights(version + 1 + i, state)).pause_s for i in range(updates)]
        started = time.perf_counter()
        await engine.pause("drain")
        await engine.update_weights(version + updates + 1, state)
        await engine.resume()
        world = time.perf_counter() - started
        await engine.abort()
    return 1000 * statistics.median(taken), 1000 * world


def copied_bytes_s(device: torch.device) -> float:
    """Return how many bytes a second a copy of a large tensor reads and writes."""
    source = torch.ones(2**30 if device.type == "cuda" else 2**27, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(5):
        sync(device)
        started = time.perf_counter()
        target.copy_(source)
        sync(device)
        best = max(best, 2 * source.nbytes / (time.perf_counter() - started))
    return best


def step_bytes(model: Any, work: Load) -> float:
    """Return what one token of every row must read: all weights once, and the keys and values of half a response."""
    weights = sum(parameter.nbytes for parameter in model.parameters())
    config = SMOLLM2_135M
    per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * 64 * next(model.parameters()).itemsize
    mean = len(work.prompts[0]) + sum(work.lengths) / len(work.lengths) / 2
    return float(weights + work.rows * mean * per_token)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def rate(name: str, work: Load, seconds: float) -> float:
    found = work.tokens / seconds
    say(f"{name}: {found:,.0f} tokens/s ({work.tokens} tokens, {seconds:.2f} s, {work.rows} rows)")
    return round(found, 1)


async def measure_native(name: str, work: Load, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Time the engine on a load of its own model; also its pauses under that load."""
    model = build(device, options.dtype)
    unprepared, began = native_engine(model, work, options), time.perf_counter()
    await unprepared.prepare()
    say(f"{name}: ready to decode in {time.perf_counter() - began:.1f} s")
    async with serving(unprepared) as engine:
        await ask(engine, work.requests()[: min(work.rows, GROUP)])
        found = [await native_pass(engine, work, device) for _ in range(options.rounds)]
        pause_ms, world_ms = await pauses(engine, model, work, options.updates)
    seconds, processor = min(found)
    return {
        "tok_s": rate(name, work, seconds),
        "processor": work.tokens / processor,
        "bytes_s": step_bytes(model, work) * work.tokens / seconds / work.rows,
        "pause_ms": round(pause_ms, 3),
        "stop_the_world_ms": round(world_ms, 1),
    }


def measure_transformers(
    name: str, work: Load, device: torch.device, options: argparse.Namespace, *, static: bool
) -> dict[str, Any]:
    model = build(device, options.dtype)
    warm = work if device.type == "cuda" else Load(work.prompts[:GROUP], [4] * GROUP, work.rows)
    transformers_pass(model, warm, device, static=static)
    seconds, processor = min(transformers_pass(model, work, device, static=static) for _ in range(options.rounds))
    return {"tok_s": rate(name, work, seconds), "processor": work.tokens / processor}


def on_cpu(device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    result = {} if "engines" in options.skip else engines_on_cpu(device, options)
    if "runs" not in options.skip:
        result |= {**sync_ratio(options.steps), **busy_share(4 * options.steps)}
    return result


def engines_on_cpu(device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    work = load(options.requests or 64, options.rows or 16, options.prompt_tokens)
    plain = measure_transformers("transformers", work, device, options, static=False)
    native = anyio.run(measure_native, "native", work, device, options)
    return {
        "native_tok_s": native["tok_s"],
        "transformers_tok_s": plain["tok_s"],
        "transformers_static_tok_s": None,
        "share_of_memory_bandwidth": round(native["bytes_s"] / copied_bytes_s(device), 3),
        "cpu_ratio": round(native["tok_s"] / plain["tok_s"], 3),
        "cpu_ratio_processor": round(native["processor"] / plain["processor"], 3),
        "pause_ms": native["pause_ms"],
        "stop_the_world_ms": native["stop_the_world_ms"],
    }


def on_gpu(device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    rows = options.rows or 128
    bandwidth = copied_bytes_s(device)
    say(f"a copy moves {bandwidth / 1e12:.2f} TB/s")
    loads = {
        "": load(2 * rows, rows, options.prompt_tokens, fixed=256),
        "_512": load(2 * 512, 512, options.prompt_tokens, fixed=256),
        "_spread": load(4 * rows, rows, options.prompt_tokens),
    }
    result: dict[str, Any] = {"cpu_ratio": None}
    for suffix, work in loads.items():
        if suffix.strip("_") in options.skip:
            continue
        native = anyio.run(measure_native, f"native{suffix}", work, device, options)
        plain = measure_transformers(f"transformers{suffix}", work, device, options, static=False)
        result |= {f"native_tok_s{suffix}": native["tok_s"], f"transformers_tok_s{suffix}": plain["tok_s"]}
        result[f"share_of_memory_bandwidth{suffix}"] = round(native["bytes_s"] / bandwidth, 3)
        result[f"ratio{suffix}"] = round(native["tok_s"] / plain["tok_s"], 2)
        if not suffix:
            result |= {name: native[name] for name in ("pause_ms", "stop_the_world_ms")}
        if "static" not in options.skip:
            try:
                static = measure_transformers(f"static{suffix}", work, device, options, static=True)["tok_s"]
                result[f"static_ratio{suffix}"] = round(native["tok_s"] / static, 2)
            except Exception as error:  # What others compile may fail on this machine: the rest still counts.
                say(f"static{suffix}: {error!r}")
                static = None
            result[f"transformers_static_tok_s{suffix}"] = static
            torch._dynamo.reset()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="bfloat16", type=lambda name: getattr(torch, name))
    parser.add_argument("--rows", type=int, default=0, help="rows: 16 on a CPU, 128 on a GPU")
    parser.add_argument("--requests", type=int, default=0, help="on a CPU: 64")
    parser.add_argument("--threads", type=int, default=0, help="torch's threads on a CPU; 0: its default")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--cache-gb", type=int, default=0, help="cache budget: 1 on a CPU, 24 on a GPU")
    parser.add_argument("--burst", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=0, help="timed passes, of which the best counts: 1, on a GPU 2")
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--steps", type=int, default=8, help="steps at S = 0 that count; at S = 2, four times as many")
    parser.add_argument(
        "--skip", nargs="*", default=[], help="of a GPU's loads: 512, spread, static; on a CPU: engines, runs"
    )
    options = parser.parse_args()
    cuda = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda" if cuda else "cpu")
    if options.threads:
        torch.set_num_threads(options.threads)
    options.cache_gb = options.cache_gb or (24 if cuda else 1)
    options.rounds = options.rounds or (2 if cuda else 1)
    result = on_gpu(device, options) if cuda else on_cpu(device, options)
    result |= {
        "device": torch.cuda.get_device_name() if cuda else f"cpu, {torch.get_num_threads()} threads",
        "dtype": str(options.dtype).removeprefix("torch."),
        "prompt_tokens": options.prompt_tokens,
        "torch": torch.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
