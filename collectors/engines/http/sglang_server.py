"""The routes of SGLang's server, read from the sources of 0.5.23 and tried on a fake; a real one was not run."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch

from asyncrl.collectors.engines.answer import Answer
from asyncrl.collectors.engines.base import Request
from asyncrl.collectors.engines.http.client import Client, Refused, understood
from asyncrl.collectors.engines.http.server import (
    PRESSURE_TIMEOUT_S,
    Count,
    Reply,
    Span,
    TokenId,
    Wanted,
    differing_shape,
    finish_of,
    spans_of,
)
from asyncrl.collectors.engines.in_flight import Pressure
from asyncrl.collectors.engines.weight_check import OpenFiles

_LOAD_TIMEOUT_S = 600.0
_COMPARED_ROWS = 8
_SHOWN_CHARACTERS = 300


class _Load(msgspec.Struct):
    token_usage: Annotated[float, msgspec.Meta(ge=0)]
    num_waiting_reqs: Count


class _Loads(msgspec.Struct):
    loads: list[_Load]


class _Reason(msgspec.Struct):
    type: str


class _Meta(msgspec.Struct):
    weight_version: int | str | None = None
    completion_tokens: Count | None = None
    output_token_logprobs: list[list[Any]] | None = None
    finish_reason: _Reason | None = None
    weight_versions: list[Span] | None = None


class _Event(msgspec.Struct):
    """An answer, or a part of one; of the many things in it what is needed."""

    output_ids: list[TokenId] = []
    meta_info: _Meta | None = None
    error: Any = None


class SGLangServer:
    """One replica of SGLang's server, which serves the checkpoint in a folder of the same path."""

    def __init__(self, client: Client, checkpoint: Path) -> None:
        self._client = client
        self._checkpoint = checkpoint

    async def generate(self, name: str, request: Request, answer: Answer, salt: str) -> AsyncGenerator[Reply, None]:
        """Yield one reply per event of a stream; only one without `request.stream`.

        Refused with a filter: SGLang's log-probabilities are of the distribution before top-k, top-p and min-p.
        """
        sampling = request.sampling
        if sampling.top_k or sampling.top_p < 1 or sampling.min_p:
            raise Refused("SGLang gives no log-probabilities of what top_k, top_p and min_p leave; sample without them")
        body = {
            "rid": name,
            "input_ids": answer.prompt_ids,
            "sampling_params": _sampling(request, answer),
            "return_logprob": True,
            "stream": request.stream,
            "extra_key": salt,
        }
        if not request.stream:
            yield self._reply(await self._client.ask("/generate", body), 0)
            return
        taken = 0
        async with aclosing(self._client.stream("/generate", body)) as events:
            async for event in events:
                reply = self._reply(event, taken)
                taken += len(reply.token_ids)
                yield reply

    async def abort(self, name: str) -> None:
        await self._client.post("/abort_request", {"rid": name})

    async def fault(self, wanted: Wanted) -> str:
        """Ask for its version and for one row of its output layer: more it does not tell in a way to rely on."""
        try:
            await self._client.get("/model_info")
        except Refused:
            return "it does not look like SGLang's server; see collector.server_kind"
        with OpenFiles(self._checkpoint) as weights:
            name = _head(weights)
        if name is None:
            return ""
        try:
            rows = await self._client.post("/get_weights_by_name", {"name": name, "truncate_size": 1})
        except Refused as refused:
            return f"it serves another model: it has no {name} ({refused})"
        with understood(self._client.url):
            other = differing_shape({"hidden_size": len(rows[0])}, wanted)
        return f"it serves another model: {other}" if other else ""

    async def probe(self, timeout_s: float) -> None:
        # Its /health makes a token, which none does while it is held. When its scheduler dies, all of it ends.
        await self._client.get("/model_info", timeout_s=timeout_s, tries=1)

    async def pressure(self) -> Pressure | None:
        """Ask for its loads; it takes requests back without counting them, so its cache alone tells."""
        try:
            answer = await self._client.get("/v1/loads", timeout_s=PRESSURE_TIMEOUT_S, tries=1)
        except Refused:
            return None
        try:
            loads = msgspec.convert(answer, _Loads).loads
            return Pressure(max(load.token_usage for load in loads), sum(load.num_waiting_reqs for load in loads), 0)
        except ValueError:  # Another version's answer.
            return None

    async def version(self) -> int | None:
        answer = await self._client.get("/model_info")
        with understood(self._client.url):
            label = str(answer["weight_version"])
            return int(label) if label.isdigit() else None

    async def hold(self, *, empty_cache: bool) -> None:
        # SGLang empties no cache that a running request stands in; retracted ones wait, and are computed anew.
        await self._client.post("/pause_generation", {"mode": "retract" if empty_cache else "in_place"})
        if empty_cache:
            await self._client.post("/flush_cache")

    async def go_on(self) -> None:
        await self._client.post("/continue_generation", {})

    async def load(self, file: Path | None) -> None:
        body = {
            "model_path": str(file.parent if file else self._checkpoint),
            "flush_cache": False,
            "abort_all_requests": False,
        }
        answer = await self._client.post("/update_weights_from_disk", body, timeout_s=_LOAD_TIMEOUT_S, tries=1)
        if not isinstance(answer, dict) or not answer.get("success"):
            raise Refused(f"{self._client.url} did not load {body['model_path']}: {str(answer)[:_SHOWN_CHARACTERS]}")

    async def differences(self, file: Path | None) -> list[str]:
        """Compare the first rows of the output layer, or of the embedding that it is tied to, with the file's."""
        with OpenFiles(file or self._checkpoint) as weights:
            name = _head(weights)
            if name is None:
                return ["the output layer, which was not found"]
            expected = weights.tensor(name)[:_COMPARED_ROWS].float()
        body = {"name": name, "truncate_size": _COMPARED_ROWS}
        answer = await self._client.post("/get_weights_by_name", body)
        with understood(self._client.url):
            found = torch.tensor(msgspec.convert(answer, list[list[float]]))
        same = found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-3, atol=1e-6)
        return [] if same else [name]

    async def label(self, version: int) -> None:
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._client.post("/update_weight_version", body)

    def _reply(self, event: Any, taken: int) -> Reply:
        """Read an event whose tokens are all there are so far, or, with incremental streaming, those since the last."""
        with understood(self._client.url):
            answer = msgspec.convert(event, _Event)
            if answer.error is not None:
                raise Refused(str(answer.error))
            if answer.meta_info is None:
                raise ValueError("it has no meta_info")
            meta, ids = answer.meta_info, answer.output_ids
            so_far = len(ids) if meta.completion_tokens is None else meta.completion_tokens
            if len(ids) > so_far - taken:
                ids = ids[taken:]
            entries = meta.output_token_logprobs or []
            logprobs = msgspec.convert([entry[0] for entry in entries[len(entries) - len(ids) :]], list[float])
            if meta.finish_reason is None:
                return Reply(tuple(ids), tuple(logprobs))
            told = meta.weight_versions or [Span(msgspec.convert(meta.weight_version, int | str), 0, so_far)]
            return Reply(tuple(ids), tuple(logprobs), finish_of(meta.finish_reason.type), spans_of(told))

    async def close(self) -> None:
        await self._client.close()


def _head(weights: OpenFiles) -> str | None:
    """Return the name of the output layer's weight: the embedding's, if it is tied to that."""
    heads = (name for name in sorted(weights.names()) if name.endswith(("lm_head.weight", "embed_tokens.weight")))
    return next(heads, None)


def _sampling(request: Request, answer: Answer) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "max_new_tokens": answer.left,
        "temperature": sampling.temperature,
        "sampling_seed": answer.seed,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,
    }
