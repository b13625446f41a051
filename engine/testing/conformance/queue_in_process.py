"""TransferQueue's own controller and storage in this process, for tests that need no Ray."""

import uuid
from pathlib import Path

from asyncrl.engine.data_plane.sampler import BookSampler
from asyncrl.engine.data_plane.shared_memory import SharedMemory
from asyncrl.engine.data_plane.tq import TransferQueuePlane


def queue_in_process(
    *,
    deadline_s: float = 10.0,
    capacity_rows: int | None = None,
    lease_s: float = 600.0,
    shared_memory: Path | None = None,
) -> TransferQueuePlane:
    """Start TransferQueue over loopback in this process, and return the plane that owns it."""
    import ray.util
    from transfer_queue.client import TransferQueueClient
    from transfer_queue.controller import TransferQueueController
    from transfer_queue.storage.simple_storage import SimpleStorageUnit

    ray.util.get_node_ip_address = lambda *_, **__: "127.0.0.1"
    controller = TransferQueueController.__ray_metadata__.modified_class(
        polling_mode=True, sampler=BookSampler(lease_s)
    )
    unit = SimpleStorageUnit.__ray_metadata__.modified_class(
        config={"num_data_storage_units": 1, "total_storage_size": capacity_rows}
    )
    client = TransferQueueClient(f"asyncrl-{uuid.uuid4().hex[:8]}", controller.get_zmq_server_info())
    client.initialize_storage_manager("SimpleStorage", {"zmq_info": {unit.storage_unit_id: unit.get_zmq_server_info()}})

    def closer() -> None:
        client.close()
        unit.shutdown()

    memory = None if shared_memory is None else SharedMemory.create(shared_memory, capacity_rows)
    return TransferQueuePlane(client, deadline_s=deadline_s, closer=closer, memory=memory)
