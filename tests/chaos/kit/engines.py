"""Engines of a run in processes of their own, over HTTP, each behind a socket that can be cut.

Fakes of vLLM's server with a small model of their own; a run does not start its servers, so the session does.
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import psutil

from kit.proxy import Proxy

MODEL = "engine-model"
WORDS = ["<unk>", "</s>", *"0123456789>"]
_START_S = 120.0


class Engines:
    """`count` servers. `restore` starts what died anew, and mends what was cut."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder = folder
        self._servers: list[subprocess.Popen[str]] = []
        self._proxies: list[Proxy] = []
        save_model(folder / MODEL)
        for _ in range(count):
            server, port = self._serve(0)
            self._servers.append(server)
            self._proxies.append(Proxy(port))

    def options(self, limit_s: float) -> dict[str, str]:
        """Return what the run is told of them; it waits for `limit_s` if it has none of them."""
        return {
            "collector.server_timeout_s": f"{limit_s:g}",
            "model.path": str(self._folder / MODEL),
            "collector.engine": "http",
            "collector.count": "1",
            "collector.servers": f"[{', '.join(f'http://127.0.0.1:{proxy.port}' for proxy in self._proxies)}]",
        }

    @property
    def processes(self) -> list[psutil.Process]:
        return [psutil.Process(server.pid) for server in self._servers]

    def cut(self, pid: int) -> None:
        """Cut off the server whose process this is."""
        self._proxies[[server.pid for server in self._servers].index(pid)].cut()

    def restore(self) -> None:
        for i, (server, proxy) in enumerate(zip(self._servers, self._proxies, strict=True)):
            proxy.heal()
            if server.poll() is None:
                with suppress(psutil.NoSuchProcess):
                    psutil.Process(server.pid).resume()
            else:
                self._servers[i], _ = self._serve(proxy.target)

    def close(self) -> None:
        for server, proxy in zip(self._servers, self._proxies, strict=True):
            proxy.close()
            server.kill()
            server.wait()

    def _serve(self, port: int) -> tuple[subprocess.Popen[str], int]:
        """Start a server on a port, a free one for 0; return it and its port once it listens."""
        server = subprocess.Popen(
            [sys.executable, "-m", "kit.engines", str(self._folder / MODEL), str(port)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert server.stdout is not None
        return server, int(server.stdout.readline())


def save_model(folder: Path) -> None:
    """Write a small Llama with a tokenizer of digits, unless it is there."""
    if folder.exists():
        return
    import torch
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.decoder = Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>").save_pretrained(folder)
    torch.manual_seed(4)
    AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=True,
            eos_token_id=1,
            bos_token_id=None,
            pad_token_id=None,
        )
    ).save_pretrained(folder)


def engine_of(folder: Path, weights: Mapping[str, Any]) -> Any:
    """Return what is behind the routes of a server."""
    from transformers import AutoModelForCausalLM

    from asyncrl.engine.testing.conformance.engine_trials import native_engine

    return native_engine(AutoModelForCausalLM.from_pretrained(folder).eval(), rows=64, length=16)


async def serve(folder: Path, port: int) -> None:
    """Serve until killed; the first line of output is the port."""
    from asyncrl.engine.testing.conformance.fake_servers import FakeServer

    server = FakeServer("vllm", folder, port=port, make_engine=partial(engine_of, folder))
    async with anyio.create_task_group() as tasks:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                await server.start(tasks)
                break
            except OSError:  # Connections of the server that was killed hold its port for a moment.
                if time.monotonic() > deadline:
                    raise
                await anyio.sleep(0.2)
        sys.stdout.write(server.url.rpartition(":")[2] + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    anyio.run(serve, Path(sys.argv[1]), int(sys.argv[2]))
