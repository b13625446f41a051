"""A socket between two parts of a run, which can be cut: bytes then neither pass nor bounce, as on a network that is
partitioned."""

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_CHUNK = 1 << 16
_LOOK_S = 0.05


class Proxy:
    """Listens on a port of its own and passes bytes to `port` on loopback, unless it is `cut`.

    While it is cut, connections stay open and silent, and what was sent waits; `heal` delivers it. `delay_s` is how
    long each chunk takes.
    """

    def __init__(self, port: int) -> None:
        self.target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open = threading.Event()
        self._open.set()
        self._closed = threading.Event()
        self.delay_s = 0.0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._open.clear()

    def heal(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._closed.set()
        self._open.set()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # The listener was closed.
            while True:
                near, _ = self._listener.accept()
                # One that is refused closes the near side, as if there were no proxy.
                with suppress(OSError):
                    far = socket.create_connection(("127.0.0.1", self.target))
                    for source, target in ((near, far), (far, near)):
                        threading.Thread(target=self._pass, args=(source, target), daemon=True).start()
                    continue
                near.close()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        # ValueError: the thread of the other direction has closed both.
        with source, target, suppress(OSError, ValueError):
            while not self._closed.is_set():
                ready, _, _ = select.select([source], [], [], _LOOK_S)
                if not ready:
                    continue
                data = source.recv(_CHUNK)
                self._closed.wait(self.delay_s)
                self._open.wait()
                if not data:
                    return
                target.sendall(data)


@contextmanager
def proxied(port: int) -> Iterator[Proxy]:
    """Have a proxy for the length of the context."""
    proxy = Proxy(port)
    try:
        yield proxy
    finally:
        proxy.close()
