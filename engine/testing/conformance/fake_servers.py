"""Fakes of vLLM's and SGLang's servers: their real routes, on loopback, before a scripted engine or one with a model.

What a route takes and gives was read from the sources of vLLM 0.32.0 and SGLang 0.5.23.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from aiohttp import web
from safetensors.torch import load_file

from asyncrl.collectors.engines.base import Result
from asyncrl.collectors.engines.in_flight import Pressure
from asyncrl.engine.testing.conformance.fake_routes import sglang_routes, vllm_routes
from asyncrl.engine.testing.scripted_engine import ScriptedEngine

MakeEngine = Callable[[Mapping[str, Any]], Any]
"""(weights of the checkpoint) → the engine behind the routes."""


class FakeServer:
    """Serves on `port`, by default a free one, until `kill`; `start` serves there again, as a process started anew.

    `asked` counts requests. The next `refuse` loads fail; with `forget` they report success and load nothing. While it
    is `hung` it answers nothing more. `missing` are routes that it does not have, for want of an option at its start,
    each with the status of what it answers there. `about` is what its workers say of themselves, `load_told` what it
    says of its load, None for nothing.
    """

    def __init__(
        self,
        kind: str,
        checkpoint: Path,
        *,
        rows: int = 8,
        token_s: float = 0.001,
        make_engine: MakeEngine | None = None,
        port: int = 0,
    ) -> None:
        self._checkpoint = checkpoint
        self._routes = (vllm_routes if kind == "vllm" else sglang_routes)(self)
        self._make_engine = make_engine or (lambda weights: ScriptedEngine(weights, rows=rows, token_s=token_s))
        self._port = port
        self._runner: web.AppRunner | None = None
        self._tasks: Any = None
        self.refuse = 0
        self.forget = False
        self.asked = 0
        self.hung = False
        self.load_told: Pressure | None = Pressure(cache_used=0.0, waiting=0, preemptions=0)
        self.missing: dict[str, int] = {}
        self.about: dict[str, Any] = {
            "backend": "asyncrl_file",
            "logprobs_mode": "processed_logprobs",
            "max_length": 1024,
            "model": {},
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def start(self, tasks: Any) -> None:
        """Serve the checkpoint's weights, unlabelled, by tasks of this group."""
        self._group = tasks
        self.weights = dict(load_file(self._checkpoint / "model.safetensors"))
        self.label: str | None = None
        self._labels = {0: "0"}
        self._loaded = False
        self.engine = self._make_engine(self.weights)
        self._tasks = anyio.CancelScope()
        tasks.start_soon(self._serve)
        app = web.Application(middlewares=[self._admit])
        app.add_routes([web.route(method, path, act) for method, path, act in self._routes])
        self._runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def restart(self) -> None:
        """Start again, by tasks of the same group."""
        await self.start(self._group)

    async def kill(self) -> None:
        """Be gone, with all connections; idempotent."""
        if self._runner is not None:
            # Connections first: a process that dies says no last word.
            await self._runner.cleanup()
            self._runner = None
            self._tasks.cancel()

    async def _serve(self) -> None:
        with self._tasks:
            await self.engine.run()

    async def awake(self) -> None:
        """Return unless the server hangs."""
        while self.hung:  # noqa: ASYNC110
            await anyio.sleep(0.01)

    @web.middleware
    async def _admit(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        await self.awake()
        status = self.missing.get(request.path)
        return await handler(request) if status is None else web.Response(status=status, text="it is not served")

    def load(self, path: Path) -> bool:
        """Load a file, or a folder of one."""
        if self.refuse:
            self.refuse -= 1
            return False
        if not self.forget:
            self.weights = dict(load_file(path if path.is_file() else path / "model.safetensors"))
            self._loaded = True
        return True

    async def relabel(self, label: str) -> None:
        """Stamp what comes with a label, an older one too; what was loaded computes from here on."""
        if self.label is None and not self._loaded:
            self._labels[0] = label
        elif label != self.label or self._loaded:
            self._loaded = False
            version = (await self.engine.stats()).version + 1
            self._labels[version] = label
            await self.engine.update_weights(version, self.weights)
        self.label = label

    def spans(self, result: Result) -> list[dict[str, Any]]:
        """Return a result's spans under the labels of their time."""
        return [{"version": self._labels[v], "start": first, "end": end} for v, first, end in result.spans]


@asynccontextmanager
async def fake_servers(kind: str, checkpoint: Path, count: int = 1, **more: Any) -> AsyncIterator[list[FakeServer]]:
    """Run fakes of one kind."""
    servers = [FakeServer(kind, checkpoint, **more) for _ in range(count)]
    async with anyio.create_task_group() as tasks:
        for server in servers:
            await server.start(tasks)
        yield servers
        for server in servers:
            await server.kill()
        tasks.cancel_scope.cancel()
