"""TransferQueue's own controller and storage in this process, for tests that need no Ray."""

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.engine.data_plane.curve import own_keys, secure
from asyncrl.engine.data_plane.payloads import InSharedMemory, InTransferQueue, Payloads
from asyncrl.engine.data_plane.per_row import PerRow
from asyncrl.engine.data_plane.sampler import BookSampler
from asyncrl.engine.data_plane.shared_memory import SharedMemory
from asyncrl.engine.data_plane.shelves import Shelves
from asyncrl.engine.data_plane.tq import TransferQueuePlane


def queue_in_process(
    *,
    deadline_s: float = 10.0,
    capacity_rows: int | None = None,
    lease_s: float = 600.0,
    shared_memory: Path | Shelves | None = None,
    route: Callable[[str, Any], Any] = lambda part, info: info,
) -> TransferQueuePlane:
    """Start TransferQueue over loopback in this process, and return the plane that owns it.

    With shelves as `shared_memory` it is that of one node of several.

    `route` may put something between the client and the `controller` or the `storage` unit: it is given where they
    listen, and returns where the client is to look for them.
    """
    import ray.util
    from transfer_queue.client import TransferQueueClient
    from transfer_queue.controller import TransferQueueController
    from transfer_queue.storage.simple_storage import SimpleStorageUnit

    secure(own_keys())
    ray.util.get_node_ip_address = lambda *_, **__: "127.0.0.1"
    controller = TransferQueueController.__ray_metadata__.modified_class(
        polling_mode=True, sampler=BookSampler(lease_s)
    )
    unit = SimpleStorageUnit.__ray_metadata__.modified_class(
        config={"num_data_storage_units": 1, "total_storage_size": capacity_rows}
    )
    client = TransferQueueClient(
        f"asyncrl-{uuid.uuid4().hex[:8]}", route("controller", controller.get_zmq_server_info())
    )
    client.initialize_storage_manager(
        "SimpleStorage", {"zmq_info": {unit.storage_unit_id: route("storage", unit.get_zmq_server_info())}}
    )

    def closer() -> None:
        client.close()
        unit.shutdown()

    payloads: Payloads = InTransferQueue(client)
    if isinstance(shared_memory, Path):
        payloads = InSharedMemory(client, SharedMemory.create(shared_memory, capacity_rows))
    elif shared_memory is not None:
        payloads = PerRow(client, shared_memory)
    return TransferQueuePlane(client, deadline_s=deadline_s, closer=closer, payloads=payloads)
