"""One server's HTTP routes, with deadlines, retries, and two kinds of failure: it is down, or it said no."""

import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any

import anyio
import httpx2

from asyncrl.engine.errors import GenerationError

_BACKOFF_S = 0.05
_SHOWN_CHARACTERS = 300
LONGEST_ANSWER = 64 << 20
"""Bytes of an answer, or of one event of a stream. One of 100,000 tokens has 15 MB."""


class ServerDown(GenerationError):
    """A server does not answer, or breaks off: another may do what was asked of it."""


class Silent(ServerDown):
    """A server took too long: it hangs, and to wait for it again would hold up all others."""


class Refused(GenerationError):
    """A server answered that it will not, with an HTTP `status`: no other would, either."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@contextmanager
def understood(url: str) -> Iterator[None]:
    """Refused, with the server's name, if the block finds that an answer is none of those that it can read."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise Refused(f"{url} answered what asyncrl cannot read: {type(error).__name__}: {error}") from error


class Client:
    """Calls routes below `url`. `timeout_s` is the limit of one answer, `tries` of a call that may be repeated."""

    def __init__(self, url: str, *, timeout_s: float = 30.0, tries: int = 3) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._tries = tries
        # As many connections as there are requests: the router has the limit. A request's own deadline is its reader's.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx2.Timeout(None, connect=timeout_s)
        self._http = httpx2.AsyncClient(
            base_url=self.url,
            limits=limits,
            timeout=timeout,
            trust_env=False,
            # A compressed answer could be a thousand times as long as what comes.
            headers={"Accept-Encoding": "identity"},
            # Without https there is nothing to verify, and reading the certificates takes a tenth of a second.
            verify=self.url.startswith("https:"),
        )

    async def get(self, path: str, *, timeout_s: float | None = None, tries: int | None = None) -> Any:
        """Return the answer, None if it is empty; tried again while the server is down."""
        return await self._again("GET", path, {}, timeout_s, tries)

    async def post(
        self,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        tries: int | None = None,
    ) -> Any:
        """Return the answer, None if it is empty; tried again while the server is down: twice must be as once."""
        return await self._again("POST", path, {"json": body, "params": query}, timeout_s, tries)

    async def ask(self, path: str, body: Any) -> Any:
        """Return the answer to a request that may take as long as it likes; never tried again."""
        return await self._once("POST", path, {"json": body}, None)

    async def stream(self, path: str, body: Any) -> AsyncGenerator[Any, None]:
        """Yield the server-sent events of a request, decoded, until it says that it is done.

        ServerDown if the stream breaks off before that.
        """
        try:
            async with self._http.stream("POST", path, json=body) as answer:
                _check(answer, b"" if answer.is_success else await _content(answer), self.url + path)
                async with aclosing(_lines(answer)) as lines:
                    async for line in lines:
                        if line == b"data: [DONE]":
                            return
                        if line.startswith(b"data:"):
                            yield json.loads(line.removeprefix(b"data:"))
        except (httpx2.RequestError, ValueError, RecursionError) as error:
            raise ServerDown(f"{self.url}{path} broke off: {type(error).__name__}: {error}") from error
        raise ServerDown(f"{self.url}{path} broke off before its end")

    async def close(self) -> None:
        await self._http.aclose()

    async def _again(
        self, method: str, path: str, content: Mapping[str, Any], timeout_s: float | None, tries: int | None
    ) -> Any:
        left = self._tries if tries is None else tries
        pause_s = _BACKOFF_S
        while True:
            try:
                return await self._once(method, path, content, self._timeout_s if timeout_s is None else timeout_s)
            except Silent:
                raise
            except ServerDown:
                left -= 1
                if left <= 0:
                    raise
            await anyio.sleep(pause_s)
            pause_s *= 2

    async def _once(self, method: str, path: str, content: Mapping[str, Any], timeout_s: float | None) -> Any:
        try:
            with anyio.fail_after(timeout_s):
                async with self._http.stream(method, path, **content) as answer:
                    said = await _content(answer)
        except (TimeoutError, httpx2.TimeoutException):
            limit_s = self._timeout_s if timeout_s is None else timeout_s
            raise Silent(f"{self.url}{path} did not answer within {limit_s:g} s") from None
        except httpx2.RequestError as error:
            raise ServerDown(f"{self.url}{path} does not answer: {type(error).__name__}: {error}") from error
        _check(answer, said, self.url + path)
        try:
            return json.loads(said) if said else None
        except (ValueError, RecursionError):
            return said.decode("utf-8", errors="replace")


async def _content(answer: httpx2.Response) -> bytes:
    """Read an answer; Refused if it is longer than LONGEST_ANSWER, however it was compressed."""
    said = bytearray()
    async for part in answer.aiter_bytes():
        said += part
        if len(said) > LONGEST_ANSWER:
            raise Refused(f"{answer.url} answered with more than {LONGEST_ANSWER:,} bytes", answer.status_code)
    return bytes(said)


async def _lines(answer: httpx2.Response) -> AsyncGenerator[bytes, None]:
    """Yield the lines of an answer as they come, without their ends; Refused for one longer than LONGEST_ANSWER."""
    begun = bytearray()
    async for part in answer.aiter_bytes():
        *whole, rest = part.split(b"\n")
        for line in whole:
            yield bytes(begun + line).removesuffix(b"\r")
            begun.clear()
        begun += rest
        if len(begun) > LONGEST_ANSWER:
            raise Refused(f"{answer.url} answered with an event of more than {LONGEST_ANSWER:,} bytes")
    if begun:
        yield bytes(begun)


def _check(answer: httpx2.Response, content: bytes, what: str) -> None:
    if answer.is_success:
        return
    # A page of some other server says nothing in one line.
    page = "html" in answer.headers.get("content-type", "")
    text = content[: 4 * _SHOWN_CHARACTERS].decode("utf-8", errors="replace")
    said = "a web page" if page else " ".join(text.split())[:_SHOWN_CHARACTERS]
    message = f"{what} answered {answer.status_code}: {said}"
    # 429 and 5xx are the server's state, not the request's fault.
    if answer.status_code >= 500 or answer.status_code == 429:
        raise ServerDown(message)
    raise Refused(message, answer.status_code)
