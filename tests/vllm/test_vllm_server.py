"""vLLM's server over HTTP, a real one on this machine: the contract."""

import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from asyncrl.collectors.engines.http.engine import HTTPEngine
from asyncrl.collectors.engines.http.settings import HTTPSettings
from asyncrl.engine.testing.conformance.engine_contract import CONTRACT, TEACHING, EngineTest, Stream, Trial
from asyncrl.engine.testing.conformance.engine_trials import serving

from .conftest import MAX_LENGTH, Served, served, trial_of


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


@pytest.fixture(scope="module")
def server(checkpoint: Callable[[bool], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder, port = checkpoint(True), free_port()
    log = tmp_path_factory.mktemp("server") / "server.log"
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(server_command(folder, port), stdout=out, stderr=out, env=environment)
    settings = HTTPSettings(
        (f"http://127.0.0.1:{port}",), "vllm", str(folder), dtype="float32", max_length=MAX_LENGTH, rows=8
    )

    @asynccontextmanager
    async def trial() -> AsyncIterator[Trial]:
        engine = HTTPEngine(settings, text=lambda ids: "".join(chr(65 + t) for t in ids))
        async with serving(engine) as running:
            made = trial_of(running, True, quiet_s=0.5)
            with anyio.fail_after(280):
                stream = Stream(running, made.request(2))
                await stream.read()
                assert stream.results[0].finish == "length"
            yield made

    try:
        with served(trial, True) as ready:
            yield ready
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


@pytest.mark.parametrize("test", [*CONTRACT, *TEACHING], ids=lambda test: test.__name__)
def test_contract(server: Served, test: EngineTest) -> None:
    server.hold(test)
