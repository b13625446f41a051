"""What a server's refusal looks like in an error: one line."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import anyio
import pytest

from asyncrl.collectors.engines.http.client import Client, Refused


class OtherServer(BaseHTTPRequestHandler):
    """Answers as some web server does, and with JSON below /json."""

    def do_GET(self) -> None:
        if self.path == "/json":
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b'{"detail":\n  "no"}')
        else:
            self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), OtherServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_refusal_is_told_in_one_line(url: str) -> None:
    async def ask(path: str) -> str:
        client = Client(url, timeout_s=5.0, tries=1)
        try:
            with pytest.raises(Refused) as refused:
                await client.get(path)
            return str(refused.value)
        finally:
            await client.close()

    assert anyio.run(ask, "/health") == f"{url}/health answered 404: a web page"
    assert anyio.run(ask, "/json") == f'{url}/json answered 400: {{"detail": "no"}}'
