#!/usr/bin/env python
"""How training speeds up over the GPUs of one host: the last line is one JSON object.

    python scripts/bench_ranks.py [--device cpu|cuda] [--model qwen2-1.5b] [--ranks 2] [--repeats 3] [--ways …]

A step is `--micro-batches` of samples of 2,048 tokens (256 prompt tokens) and one AdamW update, of a random model in
bfloat16. Every way has the same global batch. `torch_one`: the PyTorch backend on one GPU, with packed rows, bfloat16
weights, float32 masters, and layers and a loss that are compiled. `torch_sharded`: the same with the model sharded over
all ranks by FSDP2; `torch_replicas`: a whole replica per rank, whose gradients the reducer sums. Both divide the
micro-batches among the ranks. `megatron_one` and `megatron_tp`: the Megatron backend with padded rows, the latter with
each matrix divided over all ranks, which all run every micro-batch; where megatron-core is not installed, `missing`
says so.

`seconds` is the median time from when all ranks begin a step to when all have ended it; `tokens_per_s` counts the
global batch, and `share_of_peak` is of all these GPUs' bfloat16 peaks. `gib` is the most memory that tensors of rank 0
took at a time. `sharded_ratio`, `replicas_ratio` and `tp_ratio` are the seconds of one rank over those of all ranks.
`refused` says why a model cannot be divided so, `failed` what a rank ended with. On a CPU: a tiny model of the same
kind, in float32 and not compiled, one thread per rank.

Each rank is a process of its own, which ends with its way.
"""

import argparse
import faulthandler
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import torch
import torch.distributed as dist
from bench_train import BETAS, CLIP, MODELS, PROMPT, Batch, Step, batch_of, build, rows_of
from torch._C._distributed_c10d import TCPStore  # Where torch's own types find it.

from asyncrl.engine.aio.blocking import in_place
from asyncrl.engine.errors import ConfigError
from asyncrl.trainers.backends.base import Backend
from asyncrl.trainers.backends.megatron.backend import MegatronBackend
from asyncrl.trainers.backends.megatron.settings import MegatronSettings, Split
from asyncrl.trainers.backends.sharded import Shards
from asyncrl.trainers.backends.torch_backend import TorchBackend
from asyncrl.trainers.backends.torch_settings import TorchSettings
from asyncrl.trainers.cost.model import CostModel
from asyncrl.trainers.cost.peak import peak_flops
from asyncrl.trainers.reducer import Alone, Gloo, MeetingPoint, Reducer

WAYS = ("torch_one", "torch_sharded", "torch_replicas", "megatron_one", "megatron_tp")
RATIOS = {
    "sharded_ratio": ("torch_one", "torch_sharded"),
    "replicas_ratio": ("torch_one", "torch_replicas"),
    "tp_ratio": ("megatron_one", "megatron_tp"),
}
SAMPLE_TOKENS = 2048
CPU_SCALE = 64
"""By how much samples, prompts and micro-batches are shorter on a CPU."""
TOLD_LINES = 25
"""How many of the last lines on a failed rank's standard error are printed."""
Found = dict[str, Any]


def ranks_of(way: str, ranks: int) -> int:
    return 1 if way.endswith("_one") else ranks


def scale_of(device: torch.device) -> int:
    return 1 if device.type == "cuda" else CPU_SCALE


def dtype_of(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class Member:
    """One of the ranks that take the steps of a way, in a process of its own; `meeting` is where they find each other.

    All happens in one thread, whose device is this rank's.
    """

    def __init__(self, way: str, rank: int, meeting: str, options: argparse.Namespace) -> None:
        self._way, self._rank, self._meeting, self._options = way, rank, meeting, options
        self._ranks = ranks_of(way, options.ranks)
        self._cuda = options.device == "cuda"
        self._device = torch.device("cuda", rank) if self._cuda else torch.device("cpu")
        self._reducer: Reducer = Alone()

    def run(self) -> Found:
        """Take the steps; return the way's figures, which are those of the whole batch on every rank."""
        if self._cuda:
            torch.cuda.set_device(self._device)
        else:
            torch.set_num_threads(1)
        self._join()
        model = build(self._options.model, self._device)
        batch, lengths = self._batch(model.config.vocab_size)
        flops = float(CostModel.of(model.config).flops(np.array(lengths)).sum())
        try:
            step = self._steps(self._backend(model), total=sum(lengths))
        except ConfigError as error:  # All ranks raise it, before they wait for each other.
            return {"refused": str(error)}
        del model  # What a backend does not keep of it should not count as its memory.
        seconds, gib = self._measured(step, batch)
        peak = peak_flops(torch.cuda.get_device_name()) if self._cuda else None
        return {
            "tokens_per_s": round(sum(lengths) / seconds),
            "share_of_peak": None if peak is None else round(flops / seconds / (peak * self._ranks), 4),
            "gib": None if gib is None else round(gib, 2),
            "seconds": round(seconds, 4),
        }

    def _join(self) -> None:
        """Meet the other ranks of the way, as a run's ranks do."""
        timeout_s = float(self._options.deadline_s)
        if self._way.startswith("megatron"):
            host, _, port = self._meeting.rpartition(":")
            timeout = timedelta(seconds=timeout_s)
            store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
            kind = "nccl" if self._cuda else "gloo"
            dist.init_process_group(kind, store=store, rank=self._rank, world_size=self._ranks, timeout=timeout)
        elif self._ranks > 1:
            reducer = Gloo(
                rank=self._rank,
                ranks=self._ranks,
                meeting=self._meeting,
                timeout_s=timeout_s,
                blocking=in_place,
                nccl=self._cuda,
            )
            anyio.run(reducer.join)
            self._reducer = reducer

    def _batch(self, vocabulary: int) -> tuple[Batch, list[int]]:
        """Return this rank's micro-batches of a step, and the lengths of all ranks' samples."""
        scale = scale_of(self._device)
        budget = self._options.micro_batch_tokens // scale
        length = SAMPLE_TOKENS // scale
        lengths = [length] * (self._options.micro_batches * (budget // length))
        batch = batch_of(lengths, vocabulary, budget)
        assert len(batch) == self._options.micro_batches, f"{len(batch)} micro-batches"
        divides = self._way in ("torch_sharded", "torch_replicas")
        return (batch[self._rank :: self._ranks] if divides else batch), lengths

    def _backend(self, model: Any) -> Backend:
        dtype = dtype_of(self._device)
        if self._way.startswith("megatron"):
            split = Split(tensor=self._ranks)
            given = MegatronSettings(1.0, CLIP, BETAS, 0.0, 1.0, split=split, packed=False)
            # It reads the weights of a model that is elsewhere, so that the device has them once.
            weights = model.cpu().state_dict()
            return MegatronBackend(model.config, weights, given, pad_id=0, device=self._device, dtype=dtype)
        settings = TorchSettings(1.0, CLIP, BETAS, 0.0, 1.0, packed=True, low_weights=True, fused=self._cuda)
        if self._way != "torch_sharded":
            return TorchBackend(model, settings, pad_id=0, compute_dtype=dtype)
        shards = Shards(self._device, ranks=self._ranks)
        return TorchBackend(model.cpu(), settings, pad_id=0, compute_dtype=dtype, shards=shards)

    def _steps(self, backend: Backend, *, total: int) -> Step:
        """Return a step like TrainerRank's; `total` counts the tokens of all ranks."""
        prompt = PROMPT // scale_of(self._device)

        def step(batch: Batch) -> None:
            for left, samples in zip(reversed(range(len(batch))), batch, strict=True):
                backend.accumulate(replace(rows_of(samples, prompt), last=not left), total)
            gradients = backend.gradients()
            if not backend.sums_gradients:
                gradients = anyio.run(self._reducer.sum, gradients)
            backend.apply(gradients, learning_rate=1e-5)

        return step

    def _measured(self, step: Step, batch: Batch) -> tuple[float, float | None]:
        """Return the median seconds of a step of all ranks, after one that is not counted, and GiB at the peak."""
        if self._cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(self._options.repeats + 1):
            self._meet()
            started = time.perf_counter()
            step(batch)
            self._meet()
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds[1:]), torch.cuda.max_memory_allocated() / 2**30 if self._cuda else None

    def _meet(self) -> None:
        """Wait until this rank's device and all other ranks are here."""
        if self._cuda:
            torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier(device_ids=[self._rank] if self._cuda else None)


def be_member(way: str, rank: int, meeting: str, options: argparse.Namespace) -> None:
    """Be one rank; rank 0 prints what was found. An error ends the process at once, whatever others wait for."""
    # A rank that waits for ever tells where, before it is killed. The deadline began before this process did.
    faulthandler.dump_traceback_later(options.deadline_s * 0.8)
    try:
        found = Member(way, rank, meeting, options).run()
        if rank == 0:
            print(json.dumps(found), flush=True)
        if dist.is_initialized():
            # Its threads end before Python does, or the process may abort at its end.
            dist.destroy_process_group()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


class Members:
    """The processes of a way's ranks, each with files for what it prints."""

    def __init__(self, way: str, options: argparse.Namespace, folder: Path) -> None:
        self._point = MeetingPoint()
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(ranks_of(way, options.ranks)):
            self._start(way, rank, options)

    def _start(self, way: str, rank: int, options: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--member", way, str(rank), self._point.address]
        for name in ("device", "model", "ranks", "repeats", "micro_batch_tokens", "micro_batches", "deadline_s"):
            command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
        environment = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", **os.environ}
        with self._file(rank, "out").open("wb") as out, self._file(rank, "err").open("wb") as err:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment)
        self._processes.append(process)

    def result(self, deadline_s: float) -> Found:
        """Wait for all ranks, and return what rank 0 printed; `failed` if one ended with an error or none did."""
        ends_at = time.monotonic() + deadline_s
        while time.monotonic() < ends_at:
            codes = [process.poll() for process in self._processes]
            failed = [rank for rank, code in enumerate(codes) if code]
            if failed:
                # The others' errors, that they lost a rank, may come before this is seen.
                failed.sort(key=lambda rank: self._file(rank, "err").stat().st_mtime)
                return self._failed(failed, f"rank {failed[0]} ended with {codes[failed[0]]}")
            if None not in codes:
                return self._printed()
            time.sleep(0.1)
        return self._failed(range(len(self._processes)), f"it took more than {deadline_s:g} s")

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _printed(self) -> Found:
        lines = self._file(0, "out").read_text().splitlines()
        found: Found = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
        return found

    def _failed(self, ranks: Sequence[int], why: str) -> Found:
        """Print the last lines on the standard error of these ranks, and return the last one of the first."""
        said = {rank: self._file(rank, "err").read_text(errors="replace").splitlines() for rank in ranks}
        for rank, lines in said.items():
            print(f"{why}; rank {rank} said:", *lines[-TOLD_LINES:], sep="\n  ", flush=True)
        return {"failed": f"{why}: {(said[ranks[0]] or ['nothing'])[-1]}"}

    def _file(self, rank: int, kind: str) -> Path:
        return self._folder / f"{rank}.{kind}"


def figures(way: str, options: argparse.Namespace) -> Found:
    """Run a way in processes of its own, which have all ended afterwards."""
    if way.startswith("megatron") and find_spec("megatron") is None:
        return {"missing": "megatron-core: scripts/install megatron"}
    with ExitStack() as stack:
        members = Members(way, options, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        stack.callback(members.kill)
        return members.result(options.deadline_s)


def ratios(ways: dict[str, Found]) -> dict[str, float | None]:
    """Return the seconds of one rank over those of all, by name; None where one of both has no figures."""
    seconds = {way: found.get("seconds") for way, found in ways.items()}
    found: dict[str, float | None] = {}
    for name, (one, many) in RATIOS.items():
        of_one, of_many = seconds.get(one), seconds.get(many)
        found[name] = round(of_one / of_many, 3) if of_one and of_many else None
    return found


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen2-1.5b")
    parser.add_argument("--ranks", type=int, default=2, help="GPUs, or on a CPU processes")
    parser.add_argument("--repeats", type=int, default=3, help="steps of each way; their median counts")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="these alone; default: all")
    parser.add_argument("--micro-batch-tokens", type=int, default=8192, help="on a GPU; a multiple of 2,048")
    parser.add_argument("--micro-batches", type=int, default=8, help="per step; a multiple of --ranks")
    parser.add_argument("--deadline-s", type=float, default=600.0, help="for each way, with the start of its processes")
    parser.add_argument("--member", nargs=3, metavar=("WAY", "RANK", "MEETING"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ranks < 1:
        parser.error(f"--ranks {options.ranks}: it must be at least 1")
    if options.micro_batches < 1 or options.micro_batches % options.ranks:
        parser.error(f"--micro-batches {options.micro_batches}: it must be a multiple of --ranks {options.ranks}")
    if options.micro_batch_tokens < SAMPLE_TOKENS or options.micro_batch_tokens % SAMPLE_TOKENS:
        parser.error(f"--micro-batch-tokens {options.micro_batch_tokens}: it must be a multiple of {SAMPLE_TOKENS}")
    if options.device == "cuda" and torch.cuda.device_count() < options.ranks:
        parser.error(f"--ranks {options.ranks}: torch sees {torch.cuda.device_count()} GPUs")
    return options


def main() -> None:
    options = parsed()
    if options.member:
        way, rank, meeting = options.member
        be_member(way, int(rank), meeting, options)
        return
    ways: dict[str, Found] = {}
    for way in options.ways:
        ways[way] = figures(way, options)
        print(f"{options.model} {way}: {json.dumps(ways[way])}", flush=True)
    told = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "model": options.model,
        "ranks": options.ranks,
        "micro_batch_tokens": options.micro_batch_tokens // scale_of(torch.device(options.device)),
        "micro_batches": options.micro_batches,
    }
    print(json.dumps({**told, "ways": ways, **ratios(ways)}))
    if any("failed" in found for found in ways.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
