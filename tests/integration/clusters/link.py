"""A program of the tests: the link between two hosts, each a network namespace with a device `node0`.

Packets go from one device to the other through this process, which needs root. So a link has a latency where the kernel
has no netem, and it can be cut. Lines read are `delay SECONDS`, `down` and `up`; each is answered with a line.

Its arguments are the process ids of what holds the two namespaces, and the addresses of the two.
"""

import ctypes
import fcntl
import heapq
import os
import select
import struct
import subprocess
import sys
import time

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_TUN_WITHOUT_HEADER = 0x1001
_LARGEST = 65536
MTU = 9000


def enter(pid: int) -> None:
    """Be in the network namespace of a process, also for what is started."""
    space = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(space, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(space)


def device(pid: int, address: str, peer: str) -> int:
    """Make `node0` in the namespace of a process; return what its packets are read from and written to."""
    enter(pid)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH", b"node0", _TUN_WITHOUT_HEADER))
    for words in (
        ("link", "set", "lo", "up"),
        ("addr", "add", address, "peer", peer, "dev", "node0"),
        ("link", "set", "node0", "mtu", str(MTU), "up"),
    ):
        subprocess.run(["ip", *words], check=True)
    return tun


def carry(tuns: list[int]) -> None:
    """Carry packets until there is nothing to read orders from."""
    other = {tuns[0]: tuns[1], tuns[1]: tuns[0]}
    waiting: list[tuple[float, int, int, bytes]] = []
    delay_s, is_up, number = 0.0, True, 0
    while True:
        limit = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for ready in select.select([0, *tuns], [], [], limit)[0]:
            if ready == 0:
                words = sys.stdin.readline().split()
                if not words:
                    return
                if words[0] == "delay":
                    delay_s = float(words[1])
                else:
                    is_up = words[0] == "up"
                sys.stdout.write("done\n")
                sys.stdout.flush()
                continue
            packet = os.read(ready, _LARGEST)
            if is_up:
                number += 1
                heapq.heappush(waiting, (time.monotonic() + delay_s, number, other[ready], packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, to, packet = heapq.heappop(waiting)
            os.write(to, packet)


if __name__ == "__main__":
    first, second, here, there = sys.argv[1:]
    both = [device(int(first), here, there), device(int(second), there, here)]
    # Who kills all of a host does not mean the link.
    enter(os.getppid())
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    carry(both)
