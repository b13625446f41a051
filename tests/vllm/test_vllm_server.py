"""vLLM's server over HTTP, a real one on this machine: a run of `asyncrl train` on it, and the contract."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import httpx2
import pytest

from asyncrl.collectors.engines.http.engine import HTTPEngine
from asyncrl.collectors.engines.http.settings import HTTPSettings
from asyncrl.engine.testing.conformance.engine_contract import CONTRACT, TEACHING, EngineTest, Stream, Trial
from asyncrl.engine.testing.conformance.engine_trials import serving

from .conftest import MAX_LENGTH, Served, served, trial_of, write_tokenizer

TASK = """
from asyncrl.collectors.tasks.digits import Echo


class FirstDigit(Echo):
    def score(self, prompt, response):
        return float(response[:1].isdigit() and int(response[0]))
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def server_command(folder: Path, port: int) -> list[str]:
    """Return the command of docs/engines.md."""
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", str(MAX_LENGTH)),
        *("--max-num-seqs", "8", "--kv-cache-memory-bytes", str(2**27), "--enforce-eager", "--skip-tokenizer-init"),
        *("--enable-scale-out", "--logprobs-mode", "processed_logprobs"),
        *("--worker-extension-cls", "asyncrl.collectors.engines.vllm.worker.WorkerExtension"),
        *("--weight-transfer-config", '{"backend": "asyncrl_file"}'),
    ]


@dataclass(frozen=True)
class Started:
    """A server that answers at `url`, and the checkpoint folder that it serves."""

    url: str
    folder: Path


@pytest.fixture(scope="module")
def started(checkpoint: Callable[[bool], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    folder, port = checkpoint(True), free_port()
    write_tokenizer(folder)
    log = tmp_path_factory.mktemp("server") / "server.log"
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(server_command(folder, port), stdout=out, stderr=out, env=environment)
    try:
        until_healthy(f"http://127.0.0.1:{port}", process)
        yield Started(f"http://127.0.0.1:{port}", folder)
    except BaseException as error:
        error.add_note(log.read_text()[-4000:])
        raise
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def until_healthy(url: str, process: "subprocess.Popen[bytes]") -> None:
    ends = time.monotonic() + 280
    while process.poll() is None and time.monotonic() < ends:
        try:
            if httpx2.get(f"{url}/health", timeout=5, trust_env=False).is_success:
                return
        except httpx2.TransportError:
            pass
        time.sleep(0.5)
    raise TimeoutError(f"the server at {url} did not come up")


@pytest.fixture(scope="module")
def server(started: Started) -> Iterator[Served]:
    settings = HTTPSettings((started.url,), "vllm", str(started.folder), dtype="float32", max_length=MAX_LENGTH, rows=8)

    @asynccontextmanager
    async def trial() -> AsyncIterator[Trial]:
        engine = HTTPEngine(settings, text=lambda ids: "".join(chr(65 + t) for t in ids))
        async with serving(engine) as running:
            made = trial_of(running, True, quiet_s=0.5)
            with anyio.fail_after(60):
                stream = Stream(running, made.request(2))
                await stream.read()
                assert stream.results[0].finish == "length"
            yield made

    with served(trial, True) as ready:
        yield ready


def train(started: Started, folder: Path, *more: str) -> "subprocess.CompletedProcess[str]":
    """Run `asyncrl train` on the server, into `folder`/out, with rewards that differ within each group."""
    (folder / "first_digit.py").write_text(TASK)
    values = [
        f"model.path={started.folder}",
        "collector.engine=http",
        f"collector.servers=[{started.url}]",
        "collector.decode_samples=8",
        "rollout.groups_per_step=4",
        "rollout.group_size=4",
        "task.name=first_digit:FirstDigit",
        "trainer.ranks=1",
        "trainer.sft_warm_up_steps=5",
        "filters=[]",
        *more,
    ]
    options = [word for value in values for word in ("--set", value)]
    return subprocess.run(
        [sys.executable, "-m", "asyncrl", "train", "--runtime", "local", "--steps", "4", "--run-dir", "out", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


@pytest.mark.timeout(600)  # The server's start counts, minutes of it on a busy machine.
def test_asyncrl_train_runs_on_the_server(started: Started, tmp_path: Path) -> None:
    """First of all tests on this server: the engine of those to come then has to undo what a run has left.

    The warm-up makes another version 0 than the checkpoint. Tokens of age 0 have the trainer's log-probabilities.
    """
    done = train(started, tmp_path, "rollout.max_staleness=0")
    assert done.returncode == 0, done.stdout + done.stderr
    events = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    steps = [event["metrics"] for event in events if event["type"] == "step_ended"]
    assert [step["train/ratio_mean"] for step in steps] == pytest.approx([1.0] * 4, abs=1e-3)
    assert any(step["train/grad_norm"] > 0.01 for step in steps[:-1])
    published = [event for event in events if event["type"] == "published"]
    assert [event["version"] for event in published][:4] == [0, 1, 2, 3]
    assert all(event["bytes"] for event in published)


def test_what_the_server_cannot_serve_is_refused_before_the_run(started: Started, tmp_path: Path) -> None:
    done = train(started, tmp_path, "collector.slot_tokens=4096", "rollout.max_new_tokens=8")
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"it takes sequences of {MAX_LENGTH} tokens" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("test", [*CONTRACT, *TEACHING], ids=lambda test: test.__name__)
def test_contract(server: Served, test: EngineTest) -> None:
    server.hold(test)
