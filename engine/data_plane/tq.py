"""The plane on TransferQueue 0.1.11: how it starts, is attached to and ends.

Of the product only this file, sampler.py and curve.py import TransferQueue. What the file guards against, each
measured: only the owner may close (an attached process would kill the shared controller); TransferQueue's actors ask
for no CPU (with too few, starting hangs silently).

TransferQueue unpickles what it receives. So its sockets ask for the keys of curve.py, and they bind to the address that
Ray knows a node by: loopback on a cluster of our own (lifecycle/process_env.py).
"""

import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import structlog

from asyncrl.engine.data_plane.client_plane import ClientPlane
from asyncrl.engine.data_plane.curve import CurveKeys, beyond_loopback, own_keys, secure
from asyncrl.engine.data_plane.mooncake import MooncakeAddress, MooncakeStore
from asyncrl.engine.data_plane.mooncake_service import MooncakeService, MooncakeSettings, node_address
from asyncrl.engine.data_plane.payloads import InMooncake, InSharedMemory, InTransferQueue, Payloads
from asyncrl.engine.data_plane.per_row import PerRow
from asyncrl.engine.data_plane.placed import Placed, on_nodes, with_keys
from asyncrl.engine.data_plane.sampler import BookSampler
from asyncrl.engine.data_plane.shared_memory import SharedMemory
from asyncrl.engine.data_plane.shelves import OnNodes, Shelves
from asyncrl.engine.errors import DataPlaneDown, DataPlaneError, Overdue

# TransferQueue is one per process: an end that was given up would otherwise end what was started after it.
_ONE = threading.Lock()
_PING_EVERY_S = 1.0
_DOWN_CLOSE_S = 1.0
_CONFIG_EVERY_S = 0.1
_CONTROLLER = "TransferQueueController"


class TransferQueuePlane(ClientPlane):
    """A DataPlane client on a running TransferQueue. Build it with `start` or `attach`."""

    def __init__(
        self,
        client: Any,
        *,
        deadline_s: float,
        closer: Callable[[], None],
        payloads: Payloads,
        pings: Sequence[Callable[[], Awaitable[Any]]] = (),
        service: MooncakeService | None = None,
        shelves: Shelves | None = None,
    ) -> None:
        super().__init__(client, payloads, deadline_s=deadline_s)
        self._closer = closer
        self._pings = pings
        self._service = service
        self._shelves = shelves

    @classmethod
    async def start(
        cls,
        *,
        storage_units: int,
        deadline_s: float,
        start_s: float,
        capacity_rows: int | None = None,
        lease_s: float = 600.0,
        shared_memory: Path | OnNodes | None = None,
        mooncake: MooncakeSettings | None = None,
        nodes: Sequence[str] = (),
    ) -> "TransferQueuePlane":
        """Start TransferQueue in this job's namespace of its Ray cluster, and own it: others have their own beside it.

        With `shared_memory`, a directory that all processes of this host see, payloads go there; on several nodes, some
        of which have one each, per row there or to TransferQueue's storage; with `mooncake` to a store that is started
        with these settings. Storage units are on `nodes`, Ray's ids, by turns; without on
        all of the cluster. ValueError if both `shared_memory` and `mooncake` are given.
        """
        if mooncake is not None and (shared_memory is not None or capacity_rows is not None):
            raise ValueError("Mooncake's room is in bytes; it takes neither shared_memory nor capacity_rows")
        service = None
        if mooncake is not None:
            # Not abandoned when cancelled: whatever it has started by then would have no owner.
            service = await anyio.to_thread.run_sync(MooncakeService, mooncake, start_s, nodes)
        memory = SharedMemory.create(shared_memory, capacity_rows) if isinstance(shared_memory, Path) else None
        shelves = None
        keys = own_keys()
        # Read by `attach`.
        own: dict[str, Any] = {
            "memory": memory and str(memory.path),
            "mooncake": service and asdict(service.address),
            "shelves": None,
            "capacity_rows": capacity_rows,
            "curve": keys.written,
        }
        config = {
            "asyncrl": own,
            "controller": {"polling_mode": True, "sampler": BookSampler(lease_s)},
            "backend": {
                "storage_backend": "SimpleStorage",
                "SimpleStorage": {
                    "num_data_storage_units": storage_units,
                    "total_storage_size": capacity_rows,
                },
            },
            "metrics": {"enabled": False},
        }
        try:
            with anyio.fail_after(start_s):
                if isinstance(shared_memory, OnNodes):
                    shelves = await Shelves.start(shared_memory, node_address())
                    own["shelves"] = {"paths": dict(shelves.paths), "id": shelves.id}
                await anyio.to_thread.run_sync(partial(_start_on_ray, config, keys, nodes), abandon_on_cancel=True)
        except BaseException as error:
            if memory is not None:
                memory.close()
            if service is not None:
                service.close()
            if shelves is not None:
                with anyio.CancelScope(shield=True):
                    await shelves.close()
            if isinstance(error, TimeoutError):
                raise Overdue(f"TransferQueue did not start within {start_s:g} s") from None
            raise
        import transfer_queue
        from transfer_queue import interface

        units = list((interface._TQ_STORAGE or {}).get("SimpleStorage", {}).values())
        pings = [
            interface._TQ_CONTROLLER.get_zmq_server_info.remote,
            *(unit.get_zmq_server_info.remote for unit in units),
        ]
        client = transfer_queue.get_client()
        plane = cls(
            client,
            deadline_s=deadline_s,
            closer=_end,
            payloads=_payloads(client, memory, shelves, None if service is None else service.store),
            pings=[*pings, *(service.pings() if service else ()), *(shelves.pings() if shelves else ())],
            service=service,
            shelves=shelves,
        )
        exposed = beyond_loopback([(await ping()).ip for ping in pings])
        if exposed:
            structlog.get_logger().warning(
                "TransferQueue listens where other machines may reach it, and unpickles what those with the run's key "
                "send; allow its ports between the nodes of the cluster alone (SECURITY.md)",
                addresses=exposed,
            )
        if service is not None:
            structlog.get_logger().warning(
                "Mooncake moves bytes through ports that listen on all interfaces and ask for no key; allow them "
                "between the nodes of the run alone (SECURITY.md)",
                master=service.address.master,
                protocol=service.address.protocol,
            )
        return plane

    @classmethod
    async def attach(cls, *, deadline_s: float, start_s: float) -> "TransferQueuePlane":
        """Attach to the TransferQueue of this job; closing leaves it running, and none is ever started."""
        import transfer_queue

        try:
            with anyio.fail_after(start_s):
                options = await anyio.to_thread.run_sync(_attach_on_ray, abandon_on_cancel=True)
        except TimeoutError:
            raise Overdue(f"no TransferQueue to attach to within {start_s:g} s") from None
        client = transfer_queue.get_client()
        memory = None
        if options["memory"] is not None:
            memory = SharedMemory.open(Path(options["memory"]), options["capacity_rows"])
        store = None
        if options["mooncake"] is not None:
            address = MooncakeAddress(**options["mooncake"])
            store = await anyio.to_thread.run_sync(MooncakeStore, address, node_address(), abandon_on_cancel=True)
        shelves = None
        if options["shelves"] is not None:
            shelves = Shelves(dict(options["shelves"]["paths"]), node_address(), str(options["shelves"]["id"]))
        payloads = _payloads(client, memory, shelves, store)
        return cls(client, deadline_s=deadline_s, closer=client.close, payloads=payloads)

    async def watch(self) -> None:
        if not self._pings:
            await anyio.sleep_forever()
        while True:
            await anyio.sleep(_PING_EVERY_S)
            for ping in self._pings:
                try:
                    with anyio.fail_after(self._deadline_s):
                        await ping()
                except TimeoutError:
                    self._down = f"TransferQueue has not answered for {self._deadline_s:g} s"
                    raise DataPlaneDown(self._down) from None
                except _ray_errors() as error:
                    self._down = f"a process of TransferQueue died: {error}"
                    raise DataPlaneDown(self._down) from error
                except DataPlaneError as error:
                    self._down = str(error)
                    raise DataPlaneDown(self._down) from error

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # An orderly end waits for processes that are gone; the cluster's own end takes the rest.
        limit = _DOWN_CLOSE_S if self._down else self._deadline_s
        with anyio.move_on_after(limit, shield=True):
            await anyio.to_thread.run_sync(self._closer, abandon_on_cancel=True)
        if self._service is not None:
            # Not given up: nobody else ends its master.
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._service.close)
        if self._shelves is not None:
            with anyio.CancelScope(shield=True):
                await self._shelves.close()
        self._payloads.close()


def _ray_errors() -> tuple[type[BaseException], ...]:
    from ray.exceptions import RayError

    return (RayError,)


def _attach_on_ray() -> Any:
    """Attach, and return the owner's options; DataPlaneError if there is no TransferQueue."""
    import ray
    from transfer_queue import interface

    controller = interface._TQ_CONTROLLER or _own_controller()
    if controller is None:
        raise DataPlaneError("this run has no TransferQueue on its Ray cluster; its owner has to start it first")
    while (config := ray.get(controller.get_config.remote())) is None:
        time.sleep(_CONFIG_EVERY_S)  # Its owner is about to store it.
    options = config["asyncrl"]
    secure(CurveKeys.read(options["curve"]))
    # The owner's handle stays: with it would go the controller.
    interface._TQ_CONTROLLER = controller
    interface._init_from_existing()
    return options


def _payloads(
    client: Any, memory: SharedMemory | None, shelves: Shelves | None, store: MooncakeStore | None
) -> Payloads:
    if store is not None:
        return InMooncake(client, store)
    if shelves is not None:
        return PerRow(client, shelves)
    return InTransferQueue(client) if memory is None else InSharedMemory(client, memory)


def _own_controller() -> Any:
    """Return TransferQueue's controller in this job's namespace; None if there is none.

    TransferQueue itself looks in one namespace for all, where it would find that of another run.
    """
    import ray

    try:
        return ray.get_actor(_CONTROLLER, namespace=ray.get_runtime_context().namespace)
    except ValueError:
        return None


def _end() -> None:
    """End TransferQueue's processes without asking them.

    TransferQueue itself waits for its units. One that is suspended answers nobody, Ray ends meanwhile, and the wait
    never does: the next start in this process would wait too.
    """
    import ray
    from transfer_queue import interface

    with _ONE:
        client, storage, controller = interface._TQ_CLIENT, interface._TQ_STORAGE, interface._TQ_CONTROLLER
        interface._TQ_CLIENT = interface._TQ_STORAGE = interface._TQ_CONTROLLER = None
        units = (storage or {}).get("SimpleStorage", {}).values()
        for actor in (*units, controller):
            if actor is not None:
                ray.kill(actor)
    if client is not None:
        client.close()


def _start_on_ray(config: dict[str, Any], keys: CurveKeys, nodes: Sequence[str]) -> None:
    with _ONE:
        _start(config, keys, nodes)


def _start(config: dict[str, Any], keys: CurveKeys, nodes: Sequence[str]) -> None:
    import ray
    import transfer_queue
    from omegaconf import OmegaConf
    from transfer_queue import interface
    from transfer_queue.controller import TransferQueueController
    from transfer_queue.storage.simple_storage import SimpleStorageUnit

    if _own_controller() is not None:
        raise DataPlaneError("this run has a TransferQueue on its Ray cluster already; there can be one, and one owner")
    # Left by a start that was given up, of a cluster that is gone: TransferQueue would take its storage for this one's.
    interface._TQ_CLIENT = interface._TQ_STORAGE = interface._TQ_CONTROLLER = None
    secure(keys)
    # TransferQueue's controller is where its owner is, and its units go round the nodes.
    here = [ray.get_runtime_context().get_node_id()] if nodes else []
    originals = {actor: actor.options for actor in (SimpleStorageUnit, TransferQueueController)}
    find = interface._init_from_existing
    for actor, where in ((SimpleStorageUnit, nodes), (TransferQueueController, here)):
        actor.options = partial(Placed, with_keys(actor), keys, on_nodes(where))
    # It would attach to a TransferQueue that somebody else has on this cluster.
    interface._init_from_existing = lambda: False
    try:
        transfer_queue.init(OmegaConf.create(config, flags={"allow_objects": True}))
    finally:
        interface._init_from_existing = find
        for actor, options in originals.items():
            actor.options = options
