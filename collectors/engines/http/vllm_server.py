"""The routes of vLLM's server: token ids in, token ids, log-probabilities and spans out.

It has to be started with VLLM_SERVER_DEV_MODE=1, `--enable-scale-out`, `--logprobs-mode processed_logprobs`,
`--worker-extension-cls asyncrl.collectors.engines.vllm.worker.WorkerExtension` and
`--weight-transfer-config '{"backend": "asyncrl_file"}'`, where asyncrl is installed too. docs/engines.md has the line.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.collectors.engines.answer import Answer
from asyncrl.collectors.engines.base import Request
from asyncrl.collectors.engines.http.client import Client, Refused, ServerDown, understood
from asyncrl.collectors.engines.http.metrics_page import values
from asyncrl.collectors.engines.http.server import (
    PRESSURE_TIMEOUT_S,
    Reply,
    Span,
    TokenId,
    Wanted,
    differing_shape,
    finish_of,
    spans_of,
)
from asyncrl.collectors.engines.in_flight import Pressure

_GENERATE = "/inference/v1/generate"
_LOAD_TIMEOUT_S = 600.0
_BACKEND = "asyncrl_file"
_EXTENSION = "--worker-extension-cls asyncrl.collectors.engines.vllm.worker.WorkerExtension"
_TRANSFER = """--weight-transfer-config '{"backend": "asyncrl_file"}'"""
_ABSENT = (403, 404, 405)
_PRESSURE = ("vllm:kv_cache_usage_perc", "vllm:num_requests_waiting", "vllm:num_preemptions_total")
_ALL = (
    "VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model FOLDER --enable-scale-out "
    f"--logprobs-mode processed_logprobs {_EXTENSION} {_TRANSFER}"
)


class _Entry(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Entry] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[TokenId] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[Span] | None = None


class _Event(msgspec.Struct):
    """An answer, or a part of one; of the many things in it what is needed."""

    choices: list[_Choice] = []
    error: Any = None


class VLLMServer:
    """One replica of vLLM's server, which serves the checkpoint in a folder of the same path."""

    def __init__(self, client: Client, checkpoint: Path) -> None:
        self._client = client
        self._checkpoint = checkpoint
        self._preempted_before: int | None = None

    async def generate(self, name: str, request: Request, answer: Answer, salt: str) -> AsyncGenerator[Reply, None]:
        """Yield one reply per event of a stream; only one without `request.stream`."""
        body = {
            "request_id": name,
            "token_ids": answer.prompt_ids,
            "sampling_params": _sampling(request, answer),
            "stream": request.stream,
            "cache_salt": salt,
        }
        if not request.stream:
            yield self._reply(await self._client.ask(_GENERATE, body))
            return
        async with aclosing(self._client.stream(_GENERATE, body)) as events:
            async for event in events:
                yield self._reply(event)

    async def abort(self, name: str) -> None:
        # So vLLM calls what it was asked for under `name`.
        await self._client.post("/abort_requests", {"request_ids": [f"generate-tokens-{name}"]})

    async def fault(self, wanted: Wanted) -> str:
        """Ask for its routes, and its workers for their configuration. No request is made, since it may be held."""
        await self._client.get("/health")
        if not await self._has("GET", "/version"):
            return "it does not look like vLLM's server; see collector.server_kind"
        missing = []
        if not await self._has("GET", "/weight_info"):
            missing.append("VLLM_SERVER_DEV_MODE=1 in its environment")
        if not await self._has("POST", _GENERATE):
            missing.append("--enable-scale-out")
        if missing:
            return f"it was started without {' and '.join(missing)}; start it with {_ALL}"
        body = {"method": "asyncrl_about", "args": [str(wanted.file)]}
        try:
            answer = await self._client.post("/collective_rpc", body)
        except ServerDown as error:
            return f"its workers do not know asyncrl ({error}); install asyncrl there too, and start it with {_ALL}"
        with understood(self._client.url):
            return next((fault for worker in answer["results"] if (fault := _worker_fault(worker, wanted))), "")

    async def probe(self, timeout_s: float) -> None:
        await self._client.get("/health", timeout_s=timeout_s, tries=1)

    async def pressure(self) -> Pressure | None:
        """Read its metrics; with several engines behind it, the fullest counts."""
        try:
            page = str(await self._client.get("/metrics", timeout_s=PRESSURE_TIMEOUT_S, tries=1))
        except Refused:
            return None
        used, waiting, preempted = (
            [value for value in values(page, metric) if isfinite(value)] for metric in _PRESSURE
        )
        if not used or not waiting or not preempted:  # --disable-log-stats, or another version's names.
            return None
        total = int(sum(preempted))
        if self._preempted_before is None:
            self._preempted_before = total
        return Pressure(max(used), int(sum(waiting)), total - self._preempted_before)

    async def version(self) -> int | None:
        answer = await self._client.get("/weight_info")
        with understood(self._client.url):
            label = answer["weight_version"]
            return int(label) if label.isdigit() else None

    async def hold(self, *, empty_cache: bool) -> None:
        await self._client.post("/pause", query={"mode": "keep", "clear_cache": "false"})
        if empty_cache:
            answer = await self._client.post("/reset_prefix_cache", query={"reset_running_requests": "true"})
            if not isinstance(answer, dict) or not answer.get("success"):
                raise Refused(f"{self._client.url} refused to empty its cache")

    async def go_on(self) -> None:
        await self._client.post("/resume")

    async def load(self, file: Path | None) -> None:
        await self._client.post("/init_weight_transfer_engine", {"init_info": {}})
        await self._load("/start_weight_update", None)
        for path in [file] if file else sorted(self._checkpoint.glob("*.safetensors")):
            await self._load("/update_weights", {"update_info": {"path": str(path)}})
        await self._load("/finish_weight_update", {})

    async def differences(self, file: Path | None) -> list[str]:
        body = {"method": "asyncrl_differing", "args": [str(file or self._checkpoint)]}
        answer = await self._client.post("/collective_rpc", body, timeout_s=_LOAD_TIMEOUT_S)
        with understood(self._client.url):
            return sorted({str(name) for worker in answer["results"] for name in worker["differing"]})

    async def label(self, version: int) -> None:
        await self._client.post("/update_weight_version", {"new_version": str(version)})

    async def close(self) -> None:
        await self._client.close()

    def _reply(self, event: Any) -> Reply:
        with understood(self._client.url):
            answer = msgspec.convert(event, _Event)
            if answer.error is not None:
                raise Refused(str(answer.error))
            (choice,) = answer.choices
            return Reply(
                tuple(choice.token_ids or ()),
                tuple(entry.logprob for entry in (choice.logprobs and choice.logprobs.content) or ()),
                None if choice.finish_reason is None else finish_of(choice.finish_reason),
                spans_of(choice.weight_versions or ()),
            )

    async def _has(self, method: str, path: str) -> bool:
        """Whether it serves a route: an empty request is refused in another way than an unknown one."""
        try:
            await (self._client.get(path) if method == "GET" else self._client.post(path, {}))
        except Refused as refused:
            return refused.status not in _ABSENT
        return True

    async def _load(self, path: str, body: Any) -> None:
        # Once: a session that was begun twice is refused.
        await self._client.post(path, body, timeout_s=_LOAD_TIMEOUT_S, tries=1)


def _worker_fault(worker: Mapping[str, Any], wanted: Wanted) -> str:
    if worker["backend"] != _BACKEND:
        return f"its weight-transfer backend is {worker['backend']!r}; start it with {_TRANSFER}"
    if worker["logprobs_mode"] != "processed_logprobs":
        return (
            f"its log-probabilities are {worker['logprobs_mode']!r}, not those of the distribution that it samples; "
            "start it with --logprobs-mode processed_logprobs"
        )
    other = differing_shape(worker["model"], wanted)
    if other:
        return f"it serves another model: {other}"
    if worker["max_length"] < wanted.max_length:
        return (
            f"it takes sequences of {worker['max_length']} tokens, and the longest prompt and "
            f"rollout.max_new_tokens come to {wanted.max_length}; start it with a larger --max-model-len"
        )
    if not worker["sees"]:
        return f"it cannot read {wanted.file}; collector.weights_folder must be the same folder for it"
    return ""


def _sampling(request: Request, answer: Answer) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "max_tokens": answer.left,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": answer.seed,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,
        "logprobs": 0,
        # Stop strings are found here, in the text of all tokens, and the request is aborted then.
        "detokenize": False,
    }
