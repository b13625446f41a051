"""The server that agents ask: on 127.0.0.1, on a free port, in the collector's process and event loop.

Invariant: a request belongs to the sample whose key it has; a key is void once its sample has ended.

A request has its key as a bearer token or, if that is none, in `X-Session-ID`: verifiers has one client for all
samples, and names in that header whose request it is.
"""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
from aiohttp import web

from asyncrl.collectors.environments.agents.chat import Drawn, Refused, events, read_chat
from asyncrl.collectors.environments.agents.sample import AgentSample

LONGEST_BODY = 16 * 2**20
"""Bytes of a request; a longer one is refused (413) before it is read to its end."""
SESSION = "X-Session-ID"
_GRACE_S = 1.0


class Proxy:
    """Listens while `run` runs."""

    def __init__(self, drawn: Drawn) -> None:
        self._drawn = drawn
        self._samples: dict[str, AgentSample] = {}
        self._port = 0
        self._listens = anyio.Event()

    async def run(self) -> None:
        app = web.Application(client_max_size=LONGEST_BODY)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=_GRACE_S)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self._port = runner.addresses[0][1]
            self._listens.set()
            await anyio.sleep_forever()
        finally:
            with anyio.move_on_after(2 * _GRACE_S, shield=True):
                await runner.cleanup()

    @asynccontextmanager
    async def admit(self, sample: AgentSample) -> AsyncIterator[tuple[str, str]]:
        """Take requests of a sample for the length of the context; gives (base_url, api_key)."""
        await self._listens.wait()
        key = secrets.token_hex(24)
        self._samples[key] = sample
        try:
            yield f"http://127.0.0.1:{self._port}/v1", key
        finally:
            del self._samples[key]

    async def _complete(self, request: web.Request) -> web.Response:
        try:
            sample = self._sample(request)
            chat = read_chat(await _body(request), self._drawn)
            reply = await sample.ask(chat)
        except Refused as refusal:
            return _refusal(refusal)
        if chat.stream is None:
            return web.json_response(reply.body)
        # The whole answer at once: tokens are only known to be the model's turn when it has ended.
        return web.Response(text=events(reply, chat.stream), content_type="text/event-stream")

    async def _models(self, request: web.Request) -> web.Response:
        try:
            self._sample(request)
        except Refused as refusal:
            return _refusal(refusal)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "asyncrl"}
        return web.json_response({"object": "list", "data": [model]})

    def _sample(self, request: web.Request) -> AgentSample:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        keys = [key.strip()] if scheme.lower() == "bearer" else []
        keys.append(request.headers.get(SESSION, ""))
        sample = next((self._samples[key] for key in keys if key in self._samples), None)
        if sample is None:
            raise Refused("no sample has this key, or it has ended", code="invalid_api_key", status=401)
        return sample


async def _body(request: web.Request) -> Any:
    try:
        # Python's own reader takes halves of surrogate pairs, of which no tokenizer makes tokens.
        return msgspec.json.decode(await request.text())
    except web.HTTPRequestEntityTooLarge as error:
        raise Refused(f"a request is at most {LONGEST_BODY:,} bytes", status=413) from error
    except (ValueError, LookupError, RecursionError) as error:
        raise Refused(f"the body is not JSON of whole characters: {error}") from error


def _refusal(refusal: Refused) -> web.Response:
    return web.json_response(refusal.body, status=refusal.status)
