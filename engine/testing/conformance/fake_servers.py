"""Fakes of vLLM's and SGLang's servers: their real routes, on loopback, before a scripted engine.

What a route takes and gives was read from the sources of vLLM 0.32.0 and SGLang 0.5.23.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from aiohttp import web
from safetensors.torch import load_file

from asyncrl.collectors.engines.base import Chunk, Request, Result, Sampling
from asyncrl.engine.testing.scripted_engine import ScriptedEngine

Route = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FakeServer:
    """Serves on a port of its own until `kill`; `start` serves on that port again, as a process started anew.

    `asked` counts requests. The next `refuse` loads fail; with `forget` they report success and load nothing.
    """

    def __init__(self, kind: str, checkpoint: Path, *, rows: int = 8, token_s: float = 0.001) -> None:
        self._checkpoint = checkpoint
        self._routes = (_vllm_routes if kind == "vllm" else _sglang_routes)(self)
        self._rows, self._token_s = rows, token_s
        self._port = 0
        self._runner: web.AppRunner | None = None
        self._tasks: Any = None
        self.refuse = 0
        self.forget = False
        self.asked = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def start(self, tasks: Any) -> None:
        """Serve the checkpoint's weights, unlabelled."""
        self.weights = dict(load_file(self._checkpoint / "model.safetensors"))
        self.label: str | None = None
        self._labels = {0: "0"}
        self.engine = ScriptedEngine(self.weights, rows=self._rows, token_s=self._token_s)
        self._tasks = anyio.CancelScope()
        tasks.start_soon(self._serve)
        app = web.Application()
        app.add_routes([web.route(method, path, act) for method, path, act in self._routes])
        self._runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]

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

    def load(self, path: Path) -> bool:
        """Load a file, or a folder of one."""
        if self.refuse:
            self.refuse -= 1
            return False
        if not self.forget:
            self.weights = dict(load_file(path if path.is_file() else path / "model.safetensors"))
        return True

    async def relabel(self, label: str) -> None:
        """Stamp what comes with a label, an older one too."""
        if self.label is None:
            self._labels[0] = label
        elif label != self.label:
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


def _request(name: str, ids: list[int], limit: int, stops: list[int], stream: bool) -> Request:
    return Request(name, tuple(ids), Sampling(limit, stop_ids=tuple(stops)), seed=0, stream=stream)


async def _answered(
    server: FakeServer, request: web.Request, asked: Request, event: Callable[[Chunk | Result, list[Chunk]], Any]
) -> web.StreamResponse:
    """Answer with one event, or with a stream of them."""
    server.asked += 1
    had: list[Chunk] = []
    stream: web.StreamResponse | None = None
    async with aclosing(server.engine.generate(asked)) as items:
        async for item in items:
            if isinstance(item, Chunk):
                had.append(item)
            if not asked.stream:
                if isinstance(item, Result):
                    return web.json_response(event(item, had))
                continue
            if stream is None:
                stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await stream.prepare(request)
            await stream.write(b"data: " + json.dumps(event(item, had)).encode() + b"\n\n")
    assert stream is not None
    await stream.write(b"data: [DONE]\n\n")
    return stream


def _vllm_routes(server: FakeServer) -> list[tuple[str, str, Route]]:
    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        sampling = body["sampling_params"]
        assert sampling["logprobs"] == 0
        assert sampling["ignore_eos"]
        assert body["cache_salt"]
        name = f"generate-tokens-{body['request_id']}"
        asked = _request(name, body["token_ids"], sampling["max_tokens"], sampling["stop_token_ids"], body["stream"])
        return await _answered(server, request, asked, event)

    def event(item: Chunk | Result, had: list[Chunk]) -> Any:
        ended = isinstance(item, Result)
        new = Chunk((), ()) if ended and had else item
        content = [{"token_id": t, "logprob": p} for t, p in zip(new.token_ids, new.logprobs, strict=True)]
        choice = {"index": 0, "token_ids": list(new.token_ids), "logprobs": {"content": content}}
        choice["finish_reason"] = item.finish if isinstance(item, Result) else None
        choice["weight_versions"] = None
        if isinstance(item, Result):
            choice["weight_versions"] = server.spans(item)
        return {"choices": [choice]}

    async def abort(request: web.Request) -> web.Response:
        await server.engine.abort((await request.json())["request_ids"] or None)
        return web.json_response({"status": "aborted"})

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def weight_info(_: web.Request) -> web.Response:
        return web.json_response({"weight_version": server.label or "default"})

    async def pause(request: web.Request) -> web.Response:
        assert dict(request.query) == {"mode": "keep", "clear_cache": "false"}
        await server.engine.pause()
        return web.json_response({"status": "paused"})

    async def resume(_: web.Request) -> web.Response:
        await server.engine.resume()
        return web.json_response({"status": "resumed"})

    async def reset(_: web.Request) -> web.Response:
        await server.engine.reset_cache()
        return web.json_response({"success": True})

    async def done(_: web.Request) -> web.Response:
        return web.json_response({"message": "done"})

    async def update(request: web.Request) -> web.Response:
        path = Path((await request.json())["update_info"]["path"])
        return web.json_response({}, status=200 if server.load(path) else 400)

    async def differing(request: web.Request) -> web.Response:
        body = await request.json()
        assert body["method"] == "asyncrl_differing"
        names = _differing(server.weights, Path(body["args"][0]))
        return web.json_response({"results": [{"compared": len(server.weights), "differing": names}]})

    async def label(request: web.Request) -> web.Response:
        await server.relabel((await request.json())["new_version"])
        return web.json_response({"success": True})

    return [
        ("POST", "/inference/v1/generate", generate),
        ("POST", "/abort_requests", abort),
        ("GET", "/health", health),
        ("GET", "/weight_info", weight_info),
        ("POST", "/pause", pause),
        ("POST", "/resume", resume),
        ("POST", "/reset_prefix_cache", reset),
        ("POST", "/init_weight_transfer_engine", done),
        ("POST", "/start_weight_update", done),
        ("POST", "/update_weights", update),
        ("POST", "/finish_weight_update", done),
        ("POST", "/collective_rpc", differing),
        ("POST", "/update_weight_version", label),
    ]


def _sglang_routes(server: FakeServer) -> list[tuple[str, str, Route]]:
    mode = ""

    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        sampling = body["sampling_params"]
        assert body["return_logprob"]
        assert sampling["ignore_eos"]
        assert body["extra_key"]
        limit, stops = sampling["max_new_tokens"], sampling["stop_token_ids"]
        asked = _request(body["rid"], body["input_ids"], limit, stops, body["stream"])
        return await _answered(server, request, asked, event)

    def event(item: Chunk | Result, had: list[Chunk]) -> Any:
        ids = [token for chunk in had for token in chunk.token_ids] if isinstance(item, Chunk) else list(item.token_ids)
        logprobs = [p for chunk in had for p in chunk.logprobs] if isinstance(item, Chunk) else list(item.logprobs)
        meta: dict[str, Any] = {"finish_reason": None, "completion_tokens": len(ids), "weight_version": server.label}
        meta["output_token_logprobs"] = [[p, token, None] for p, token in zip(logprobs, ids, strict=True)]
        if isinstance(item, Result):
            meta["finish_reason"] = {"type": item.finish}
            meta["weight_versions"] = server.spans(item)
        return {"text": "", "output_ids": ids, "meta_info": meta}

    async def abort(request: web.Request) -> web.Response:
        await server.engine.abort([(await request.json())["rid"]])
        return web.Response()

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def model_info(_: web.Request) -> web.Response:
        return web.json_response({"weight_version": server.label or "default"})

    async def pause(request: web.Request) -> web.Response:
        nonlocal mode
        mode = (await request.json())["mode"]
        await server.engine.pause()
        return web.json_response({"status": "ok"})

    async def go_on(_: web.Request) -> web.Response:
        await server.engine.resume()
        return web.json_response({"status": "ok"})

    async def flush(_: web.Request) -> web.Response:
        if mode != "retract" and (await server.engine.stats()).running:
            return web.Response(status=400, text="requests are running")
        await server.engine.reset_cache()
        return web.Response(text="Cache flushed.")

    async def update(request: web.Request) -> web.Response:
        body = await request.json()
        assert not body["abort_all_requests"]
        loaded = server.load(Path(body["model_path"]))
        return web.json_response({"success": loaded, "message": ""}, status=200 if loaded else 400)

    async def by_name(request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response(server.weights[body["name"]][: body["truncate_size"]].tolist())

    async def label(request: web.Request) -> web.Response:
        body = await request.json()
        assert not body["abort_all_requests"]
        await server.relabel(body["new_version"])
        return web.json_response({"success": True})

    return [
        ("POST", "/generate", generate),
        ("POST", "/abort_request", abort),
        ("GET", "/health", health),
        ("GET", "/model_info", model_info),
        ("POST", "/pause_generation", pause),
        ("POST", "/continue_generation", go_on),
        ("POST", "/flush_cache", flush),
        ("POST", "/update_weights_from_disk", update),
        ("POST", "/get_weights_by_name", by_name),
        ("POST", "/update_weight_version", label),
    ]


def _differing(weights: Mapping[str, Any], path: Path) -> list[str]:
    file = load_file(path if path.is_file() else path / "model.safetensors")
    return [name for name, tensor in file.items() if not tensor.equal(weights[name])]
