"""Whatever a server of vLLM or SGLang answers, it is read, or one of asyncrl's own errors names the server.

A few damages of each answer in plain pytest, 10,000 with `-m soak`.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest
import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal
from hypothesis import given, settings
from safetensors.torch import save_file

from asyncrl.collectors.engines.answer import Answer
from asyncrl.collectors.engines.base import Request, Sampling
from asyncrl.collectors.engines.http.client import Client
from asyncrl.collectors.engines.http.kinds import KINDS
from asyncrl.collectors.engines.http.server import Server, Wanted
from asyncrl.engine.errors import AsyncRLError
from asyncrl.engine.testing.conformance.damages import RANDOMS, inputs

WEIGHTS = {"lm_head.weight": torch.arange(16.0).reshape(8, 2)}


async def generated(server: Server, stream: bool) -> None:
    """Ask for tokens, and check what an engine promises of them."""
    request = Request("r", (1, 2), Sampling(4), seed=1, stream=stream)
    answer = Answer(request)
    try:
        async with aclosing(server.generate("r", request, answer, "salt")) as replies:
            async for reply in replies:
                answer.take(reply.token_ids, reply.logprobs)
                if reply.finish is not None:
                    answer.take_spans(reply.spans)
        result = answer.result("stop")
    except ValueError:  # What the engine ends the request with.
        return
    assert len(result.token_ids) == len(result.logprobs) <= 4
    assert all(0 <= token < 2**31 for token in result.token_ids)
    ends = [0, *(end for _, _, end in result.spans)]
    assert [first for _, first, _ in result.spans] == ends[:-1]
    assert ends[-1] == len(result.token_ids)


@dataclass(frozen=True)
class Call:
    """What a kind of server is asked, and what it should answer, as JSON, as lines of events, or as text."""

    kind: str
    name: str
    ask: Callable[[Server, Path], Coroutine[Any, Any, Any]]
    whole: Any


SPANS = [{"version": "3", "start": 0, "end": 1}, {"version": 4, "start": 1, "end": 3}]
CHOICE = {
    "index": 0,
    "token_ids": [5, 6, 7],
    "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.0}, {"logprob": -2}]},
    "finish_reason": "stop",
    "weight_versions": SPANS,
}
META = {
    "finish_reason": {"type": "length"},
    "completion_tokens": 3,
    "weight_version": "3",
    "weight_versions": SPANS,
    "output_token_logprobs": [[-0.5, 5, None], [-1.0, 6, None], [-2.0, 7, None]],
}
VLLM, SGLANG = {"choices": [CHOICE]}, {"text": "", "output_ids": [5, 6, 7], "meta_info": META}
BEGUN = {"choices": [{**CHOICE, "finish_reason": None, "weight_versions": None}]}
ENDED = {"choices": [{**CHOICE, "token_ids": [], "logprobs": None}]}
ABOUT = {"backend": "asyncrl_file", "logprobs_mode": "processed_logprobs", "max_length": 64, "model": {}, "sees": True}
PAGE = "# HELP\nvllm:kv_cache_usage_perc 0.5\nvllm:num_requests_waiting 1\nvllm:num_preemptions_total 2\n"


def file_of(folder: Path) -> Path:
    return folder / "model.safetensors"


def fault(server: Server, folder: Path) -> Coroutine[Any, Any, str]:
    return server.fault(Wanted({"hidden_size": 2, "vocab_size": 8}, 16, file_of(folder)))


CALLS = [
    Call("vllm", "whole", lambda server, _: generated(server, False), VLLM),
    Call("vllm", "stream", lambda server, _: generated(server, True), [BEGUN, ENDED]),
    Call("vllm", "fault", fault, {"results": [ABOUT]}),
    Call("vllm", "pressure", lambda server, _: server.pressure(), PAGE),
    Call("vllm", "version", lambda server, _: server.version(), {"weight_version": "3"}),
    Call("vllm", "hold", lambda server, _: server.hold(empty_cache=True), {"success": True}),
    Call("vllm", "differences", lambda server, f: server.differences(file_of(f)), {"results": [{"differing": ["a"]}]}),
    Call("vllm", "load", lambda server, folder: server.load(file_of(folder)), {}),
    Call("sglang", "whole", lambda server, _: generated(server, False), SGLANG),
    Call("sglang", "stream", lambda server, _: generated(server, True), [SGLANG]),
    Call("sglang", "fault", fault, [[0.0, 1.0]]),
    Call(
        "sglang",
        "pressure",
        lambda server, _: server.pressure(),
        {"loads": [{"token_usage": 0.5, "num_waiting_reqs": 1}]},
    ),
    Call("sglang", "version", lambda server, _: server.version(), {"weight_version": "3"}),
    Call("sglang", "hold", lambda server, _: server.hold(empty_cache=True), {}),
    Call("sglang", "differences", lambda server, f: server.differences(file_of(f)), WEIGHTS["lm_head.weight"].tolist()),
    Call("sglang", "load", lambda server, f: server.load(file_of(f)), {"success": True, "message": ""}),
]


class Parrot:
    """A server on loopback that gives one answer, whatever it is asked: `says`, after a header that is right."""

    def __init__(self) -> None:
        self.says = b""
        self.url = ""

    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    head = await reader.readuntil(b"\r\n\r\n")
                    length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                    await reader.readexactly(int(length[0].partition(b":")[2]) if length else 0)
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(self.says), self.says))
                    await writer.drain()
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            task_status.started()
            await anyio.sleep_forever()


@dataclass(frozen=True)
class Bench:
    """A loop in a thread of its own, with the parrot in it and one client per kind of server."""

    portal: BlockingPortal
    parrot: Parrot
    folder: Path
    servers: dict[str, Server]

    def ask(self, call: Call, says: bytes) -> None:
        self.parrot.says = says
        with suppress(AsyncRLError):
            self.portal.call(call.ask, self.servers[call.kind], self.folder)


@contextmanager
def bench(folder: Path) -> Iterator[Bench]:
    save_file(WEIGHTS, folder / "model.safetensors")
    with start_blocking_portal() as portal:
        parrot = Parrot()
        _, _ = portal.start_task(parrot.run)
        servers = {kind: make(Client(parrot.url, timeout_s=10.0, tries=1), folder) for kind, make in KINDS.items()}
        try:
            yield Bench(portal, parrot, folder, servers)
        finally:
            for server in servers.values():
                portal.call(server.close)
            portal.call(portal.stop, True)


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(tmp_path_factory.mktemp("served")) as one:
        yield one


def spoken(whole: Any, lines: list[bytes]) -> bytes:
    """Return lines of JSON as a server sends them."""
    if whole.name == "stream":
        return b"".join(b"data: " + line + b"\n\n" for line in (*lines, b"[DONE]"))
    return b"\n".join(lines)


def right(call: Call) -> list[bytes]:
    """Return the lines of the right answer."""
    if isinstance(call.whole, str):
        return call.whole.encode().splitlines()
    return [json.dumps(one).encode() for one in (call.whole if call.name == "stream" else [call.whole])]


def check(call: Call, random: Random, at: "Bench") -> None:
    """Damage what is in the events of a stream, or else the whole answer; then the stream itself."""
    for said in inputs(random, b"\n".join(right(call)), lines=not isinstance(call.whole, str)):
        at.ask(call, spoken(call, said.splitlines()) if call.name == "stream" else said)
    if call.name == "stream":
        for said in inputs(random, spoken(call, right(call)), lines=False):
            at.ask(call, said)


IDS = [f"{call.kind}-{call.name}" for call in CALLS]


@pytest.mark.parametrize("call", CALLS, ids=IDS)
def test_the_right_answer_is_understood(call: Call, at: Bench) -> None:
    """Otherwise the damaged ones would all be refused for nothing."""
    at.parrot.says = spoken(call, right(call))
    at.portal.call(call.ask, at.servers[call.kind], at.folder)


@pytest.mark.parametrize("call", CALLS, ids=IDS)
@given(random=RANDOMS)
@settings(max_examples=1, deadline=None)
def test_damaged_answers_are_read_or_refused(call: Call, random: Random, at: Bench) -> None:
    check(call, random, at)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("call", CALLS, ids=IDS)
@given(random=RANDOMS)
@settings(max_examples=35, deadline=None)
def test_many_damaged_answers_are_read_or_refused(call: Call, random: Random, at: Bench) -> None:
    check(call, random, at)


@pytest.mark.parametrize(
    ("call", "says", "words"),
    [
        ("vllm-whole", b"[" * 100_000, "answered what asyncrl cannot read"),
        ("vllm-whole", b'{"choices": [{"token_ids": [-1]}]}', "Expected `int` >= 0"),
        ("vllm-version", b'{"weight_version": 3}', "answered what asyncrl cannot read"),
        ("sglang-whole", b'{"output_ids": [1], "meta_info": {"completion_tokens": 1}}', "cannot|log-probabilities"),
        ("sglang-differences", b'[["a"]]', "Expected `float`"),
        ("sglang-load", b"null", "did not load"),
    ],
)
def test_answers_that_once_gave_a_traceback_are_errors(call: str, says: bytes, words: str, at: Bench) -> None:
    (chosen,) = (one for one in CALLS if f"{one.kind}-{one.name}" == call)
    at.parrot.says = says

    async def ask() -> None:
        server = at.servers[chosen.kind]
        if chosen.name == "whole":
            request = Request("r", (1, 2), Sampling(4), seed=1, stream=False)
            answer = Answer(request)
            async for reply in server.generate("r", request, answer, "salt"):
                answer.take(reply.token_ids, reply.logprobs)
        else:
            await chosen.ask(server, at.folder)

    with pytest.raises((AsyncRLError, ValueError), match=words):
        at.portal.call(ask)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "1e999"])
def test_metrics_that_are_no_numbers_are_not_taken_for_a_full_cache(value: str, at: Bench) -> None:
    at.parrot.says = PAGE.replace("0.5", value).encode()
    assert at.portal.call(at.servers["vllm"].pressure) is None
    at.parrot.says = PAGE.replace(" 1\n", f" {value}\n").encode()
    assert at.portal.call(at.servers["vllm"].pressure) is None
