"""What the routes of vLLM's and SGLang's servers take and give, for the fakes of both."""

import json
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web
from safetensors.torch import load_file

from asyncrl.collectors.engines.base import Chunk, Request, Result, Sampling

if TYPE_CHECKING:
    from asyncrl.engine.testing.conformance.fake_servers import FakeServer

Route = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _request(name: str, ids: list[int], limit: int, sampling: Mapping[str, Any], seed: int, stream: bool) -> Request:
    kept = Sampling(limit, temperature=sampling["temperature"], stop_ids=tuple(sampling["stop_token_ids"]))
    return Request(name, tuple(ids), kept, seed=seed, stream=stream)


async def _answered(
    server: "FakeServer", request: web.Request, asked: Request, event: Callable[[Chunk | Result, list[Chunk]], Any]
) -> web.StreamResponse:
    """Answer with one event, or with a stream of them."""
    server.asked += 1
    had: list[Chunk] = []
    stream: web.StreamResponse | None = None
    async with aclosing(server.engine.generate(asked)) as items:
        async for item in items:
            await server.awake()
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


def vllm_routes(server: "FakeServer") -> list[tuple[str, str, Route]]:
    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "token_ids" not in body:
            return web.Response(status=400, text="token_ids: Field required")
        sampling = body["sampling_params"]
        assert sampling["logprobs"] == 0
        assert sampling["ignore_eos"]
        assert body["cache_salt"]
        name, limit = f"generate-tokens-{body['request_id']}", sampling["max_tokens"]
        asked = _request(name, body["token_ids"], limit, sampling, sampling["seed"], body["stream"])
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

    async def metrics(_: web.Request) -> web.Response:
        # Two engines behind one server, the first of them idle.
        load, labels = server.load_told, ('{engine="0",model_name="m"}', '{engine="1",model_name="m"}')
        told = (
            {}
            if load is None
            else {
                "kv_cache_usage_perc": load.cache_used,
                "num_requests_waiting": load.waiting,
                "num_preemptions_total": load.preemptions,
            }
        )
        lines = ["# HELP vllm:kv_cache_usage_perc KV-cache usage."]
        for name, value in told.items():
            lines += [f"vllm:{name}{labels[0]} 0.0", f"vllm:{name}{labels[1]} {float(value)}"]
        return web.Response(text="\n".join(lines))

    async def version(_: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

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

    async def call_workers(request: web.Request) -> web.Response:
        body = await request.json()
        if body["method"] == "asyncrl_about":
            about = {"sees": os.access(body["args"][0], os.R_OK), **server.about}
            return web.json_response({"results": [about]})
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
        ("GET", "/version", version),
        ("GET", "/metrics", metrics),
        ("GET", "/weight_info", weight_info),
        ("POST", "/pause", pause),
        ("POST", "/resume", resume),
        ("POST", "/reset_prefix_cache", reset),
        ("POST", "/init_weight_transfer_engine", done),
        ("POST", "/start_weight_update", done),
        ("POST", "/update_weights", update),
        ("POST", "/finish_weight_update", done),
        ("POST", "/collective_rpc", call_workers),
        ("POST", "/update_weight_version", label),
    ]


def sglang_routes(server: "FakeServer") -> list[tuple[str, str, Route]]:
    mode = ""

    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        sampling = body["sampling_params"]
        assert body["return_logprob"]
        assert sampling["ignore_eos"]
        assert body["extra_key"]
        limit, seed = sampling["max_new_tokens"], sampling["sampling_seed"]
        asked = _request(body["rid"], body["input_ids"], limit, sampling, seed, body["stream"])
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

    async def loads(_: web.Request) -> web.Response:
        load = server.load_told
        if load is None:
            return web.Response(status=404)
        idle = {"dp_rank": 0, "token_usage": 0.0, "num_waiting_reqs": 0}
        busy = {"dp_rank": 1, "token_usage": load.cache_used, "num_waiting_reqs": load.waiting}
        return web.json_response({"version": "0.5.23", "loads": [idle, busy]})

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
        if body["name"] not in server.weights:
            return web.Response(status=400, text="no such weight")
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
        ("GET", "/v1/loads", loads),
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
