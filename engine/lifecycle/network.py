"""Which interface of a node a process listens on: the one whose address the Ray cluster knows the node by."""

import os
import socket

import psutil

from asyncrl.engine.errors import ConfigError

LOOPBACK = "127.0.0.1"


def interface_of(address: str) -> str:
    """Return the name of the interface with this address; ConfigError, with those there are, if none has it."""
    found = psutil.net_if_addrs()
    for name, entries in found.items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    known = [
        f"{name} {entry.address}"
        for name, entries in found.items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]
    raise ConfigError(
        f"Ray knows this node as {address}, and no interface has that address (there are {', '.join(known)}); start "
        "Ray with --node-ip-address, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME on this node"
    )


def listen_at(address: str) -> None:
    """Have gloo and NCCL of this process meet on the node's interface; what was set on the node stays."""
    wanted = [name for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name not in os.environ]
    if wanted:
        interface = interface_of(address)
        for name in wanted:
            os.environ[name] = interface
