"""TransferQueue's processes: who starts and ends them, where they listen, and what their death does."""

import json
import os
import pickle
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import zmq
from anyio.from_thread import BlockingPortal

from asyncrl.engine.data_plane.curve import own_keys
from asyncrl.engine.data_plane.tq import TransferQueuePlane
from asyncrl.engine.testing.conformance.plane_actors import PlaneActor
from asyncrl.engine.testing.conformance.plane_contract import (
    claim_groups,
    contract_columns,
    contract_group,
    contract_partition,
    put_groups,
    rows_of,
)


@pytest.mark.ray
@pytest.mark.timeout(220)
@pytest.mark.parametrize("victim", ["controller", pytest.param("storage unit", marks=pytest.mark.long)])
def test_transfer_queue_starts_without_a_free_cpu_and_its_silence_is_told_in_seconds(
    tmp_path: Path, warm_python: Any, victim: str
) -> None:
    """The controller is killed, the storage unit suspended. The same process can start the next one."""
    program = Path(__file__).with_name("own_cluster.py").read_text(encoding="utf-8")
    done = warm_python(tmp_path, "-c", program, victim, ray=True)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["claimed"] == ["v0_p0"]
    assert seen["watch"] == "DataPlaneDown"
    assert seen["watch_s"] < 8
    # Nobody waits for the dead: later calls fail at once, and the end is short.
    assert seen["after"] == "DataPlaneDown"
    assert seen["end_s"] < 5
    assert seen["again_s"] < 20
    # One owner: nobody attaches to nothing, and nobody starts a second one.
    assert seen["attach_without_owner"] == "DataPlaneError"
    assert seen["second_start"] == "DataPlaneError"


@pytest.mark.ray
@pytest.mark.soak
@pytest.mark.timeout(110)
def test_storage_units_are_spread_evenly_over_the_nodes_of_the_cluster() -> None:
    program = Path(__file__).with_name("two_nodes.py")
    done = subprocess.run([sys.executable, program, "2"], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    nodes = json.loads(done.stdout.splitlines()[-1])
    assert len(nodes) == 2
    assert len(set(nodes.values())) == 2, nodes


@pytest.mark.timeout(100)
def test_an_attached_client_checks_its_puts_and_its_close_leaves_the_store_running(
    portal: BlockingPortal, ray_plane: TransferQueuePlane
) -> None:
    group, odd = contract_group(0), contract_group(1, size=3)

    async def main() -> None:
        await ray_plane.register(contract_partition("attached"))
        actor = ray.remote(PlaneActor).options(num_cpus=0).remote()
        await actor.connect.remote(deadline_s=20)
        # It never registered the partition, and still knows what the partition takes.
        with pytest.raises(ray.exceptions.RayTaskError, match="3 samples"):
            await actor.call.remote("put", "attached", odd, contract_columns(odd))
        await actor.call.remote("put", "attached", group, contract_columns(group))
        await actor.call.remote("close")
        with pytest.raises(ray.exceptions.RayTaskError, match="closed"):
            await actor.call.remote("keys", "attached")
        ray.kill(actor)
        await put_groups(ray_plane, "attached", [contract_group(2)])
        assert rows_of(await claim_groups(ray_plane, "attached")) == ["v0_p0", "v0_p2"]

    portal.call(main)


def test_on_one_node_only_loopback_is_listened_on(ray_plane: TransferQueuePlane) -> None:
    """TransferQueue unpickles what it receives: nobody outside may reach it."""
    listening = set()
    for process in psutil.Process().children(recursive=True):
        # A worker that ends just now listens to nobody.
        with suppress(psutil.NoSuchProcess):
            listening |= {
                # IPv4 on an IPv6 socket is written with a prefix.
                (process.name(), connection.laddr.ip.removeprefix("::ffff:"))
                for connection in process.net_connections(kind="tcp")
                if connection.status == psutil.CONN_LISTEN
            }
    assert len(listening) >= 3
    assert {ip for _, ip in listening} <= {"127.0.0.1", "::1"}, sorted(listening)


class Touches:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> Any:
        return (os.mknod, (str(self._file),))


@pytest.mark.parametrize("server", ["controller", "storage unit"])
def test_who_lacks_the_keys_has_nothing_unpickled(server: str, ray_plane: TransferQueuePlane, tmp_path: Path) -> None:
    """The same message with the keys is unpickled: without them TransferQueue would be open to every local user."""
    from transfer_queue import interface
    from transfer_queue.utils.zmq_utils import STORAGE_MANAGER_IDENTITY_PREFIX

    units = interface._TQ_STORAGE["SimpleStorage"].values()
    actor = interface._TQ_CONTROLLER if server == "controller" else next(iter(units))
    address = ray.get(actor.get_zmq_server_info.remote()).to_addr(
        "request_handle_socket" if server == "controller" else "put_get_socket"
    )
    stranger, member = tmp_path / "stranger", tmp_path / "member"
    with zmq.Context() as context, context.socket(zmq.DEALER) as plain, context.socket(zmq.DEALER) as keyed:
        keyed.curve_publickey, keyed.curve_secretkey = zmq.curve_keypair()
        keyed.curve_serverkey = own_keys().of_server.encode()
        for socket, file in ((plain, stranger), (keyed, member)):
            socket.linger = 0
            socket.identity = f"{STORAGE_MANAGER_IDENTITY_PREFIX}{file.name}".encode()
            socket.connect(address)
            # A connection that was refused already has nowhere to send to, and would wait for ever.
            with suppress(zmq.Again):
                socket.send_multipart([b"\xc1\xfe\xed", pickle.dumps(Touches(file))], zmq.NOBLOCK)
        deadline = time.monotonic() + 10
        while not member.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    assert member.exists()
    assert not stranger.exists()


def test_a_call_from_another_event_loop_is_answered(ray_plane: TransferQueuePlane) -> None:
    """Sockets belong to a loop; a plane serves whichever loop calls it."""
    import anyio

    anyio.run(ray_plane.register, contract_partition("loops"))
    anyio.run(partial(put_groups, ray_plane, "loops", [contract_group(0)]))
    assert len(anyio.run(ray_plane.keys, "loops")) == 2
