"""CURVE on TransferQueue's sockets (CurveZMQ, RFC 26 of ZeroMQ): who lacks the run's key is not heard.

TransferQueue unpickles what reaches its sockets, so whoever could connect could run code. With CURVE a connection ends
before its first message unless the client knows the server's key. Nothing else asks who the client is, so that key,
which CURVE calls public, is a secret here: it travels over Ray alone, which has a token.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from ipaddress import ip_address
from types import FunctionType
from typing import Any

import zmq


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """What clients must know of the servers, and what only servers know; as text (Z85)."""

    of_server: str
    secret: str = ""

    @property
    def written(self) -> str:
        """What clients need, in hexadecimal: it travels through OmegaConf, which would look for a value at a `${`."""
        return self.of_server.encode().hex()

    @classmethod
    def read(cls, written: str) -> "CurveKeys":
        """Return what a client needs, from `written`."""
        return cls(bytes.fromhex(written).decode())


@cache
def own_keys() -> CurveKeys:
    """Return the keys of what this process starts; they are made once, and never written down."""
    public, secret = zmq.curve_keypair()
    return CurveKeys(public.decode(), secret.decode())


def secure(keys: CurveKeys) -> None:
    """Have TransferQueue make all its sockets of this process with these keys, from here on.

    Its modules hold `create_zmq_socket` by name, and its actors have copies of their modules: only the function's own
    code is the same for all. So that is what is replaced, and nothing else.
    """
    from transfer_queue.utils.zmq_utils import create_zmq_socket

    if _Sockets.plain is None:
        _Sockets.plain = FunctionType(
            create_zmq_socket.__code__,
            create_zmq_socket.__globals__,
            create_zmq_socket.__name__,
            create_zmq_socket.__defaults__,
        )
        create_zmq_socket.__code__ = _in_its_place.__code__
    _Sockets.keys = keys


def beyond_loopback(addresses: Iterable[str]) -> list[str]:
    """Return the IP addresses that other machines may reach, each once, in order."""
    return sorted({address for address in addresses if not ip_address(address).is_loopback})


class _Sockets:
    """How TransferQueue makes sockets in this process."""

    plain: FunctionType | None = None
    keys = CurveKeys("")
    of_client = cache(zmq.curve_keypair)


def _in_its_place(ctx: Any, socket_type: Any, ip: str, identity: Any = None) -> Any:
    # It runs with the names of TransferQueue's module.
    from asyncrl.engine.data_plane.curve import _secured_socket

    return _secured_socket(ctx, socket_type, ip, identity)


def _secured_socket(ctx: Any, socket_type: Any, ip: str, identity: Any) -> Any:
    """Make a socket: routers are its servers, and all others clients. Within one process CURVE is not used."""
    assert _Sockets.plain is not None
    socket, keys = _Sockets.plain(ctx, socket_type, ip, identity), _Sockets.keys
    if socket_type == zmq.ROUTER:
        socket.curve_server = True
        socket.curve_secretkey = keys.secret.encode()
    else:
        socket.curve_publickey, socket.curve_secretkey = _Sockets.of_client()
        socket.curve_serverkey = keys.of_server.encode()
    return socket
