"""The plane on TransferQueue 0.1.11: how it starts, is attached to and ends.

Of the product only this file and sampler.py import TransferQueue. What the file guards against, each measured: only
the owner may close (an attached process would kill the shared controller); TransferQueue's actors ask for no CPU (with
too few, starting hangs silently).

TransferQueue unpickles what it receives, so it is for trusted networks; on one node everything binds to loopback (see
lifecycle/process_env.py).
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from asyncrl.engine.data_plane.client_plane import ClientPlane
from asyncrl.engine.data_plane.payloads import InSharedMemory, InTransferQueue
from asyncrl.engine.data_plane.sampler import BookSampler
from asyncrl.engine.data_plane.shared_memory import SharedMemory
from asyncrl.engine.errors import DataPlaneDown, DataPlaneError, Overdue

_PING_EVERY_S = 1.0
_DOWN_CLOSE_S = 1.0


class TransferQueuePlane(ClientPlane):
    """A DataPlane client on a running TransferQueue. Build it with `start` or `attach`."""

    def __init__(
        self,
        client: Any,
        *,
        deadline_s: float,
        closer: Callable[[], None],
        memory: SharedMemory | None = None,
        pings: Sequence[Callable[[], Awaitable[Any]]] = (),
    ) -> None:
        payloads = InTransferQueue(client) if memory is None else InSharedMemory(client, memory)
        super().__init__(client, payloads, deadline_s=deadline_s)
        self._closer = closer
        self._pings = pings

    @classmethod
    async def start(
        cls,
        *,
        storage_units: int,
        deadline_s: float,
        start_s: float,
        capacity_rows: int | None = None,
        lease_s: float = 600.0,
        shared_memory: Path | None = None,
    ) -> "TransferQueuePlane":
        """Start TransferQueue on the Ray cluster this process is in, and own it.

        With `shared_memory`, a directory that all processes of this host see, payloads go there.
        """
        memory = None if shared_memory is None else SharedMemory.create(shared_memory, capacity_rows)
        config = {
            # Read by `attach`.
            "asyncrl": {"memory": memory and str(memory.path), "capacity_rows": capacity_rows},
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
                await anyio.to_thread.run_sync(partial(_start_on_ray, config), abandon_on_cancel=True)
        except BaseException as error:
            if memory is not None:
                memory.close()
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
        return cls(
            transfer_queue.get_client(),
            deadline_s=deadline_s,
            closer=transfer_queue.close,
            memory=memory,
            pings=pings,
        )

    @classmethod
    async def attach(cls, *, deadline_s: float, start_s: float) -> "TransferQueuePlane":
        """Attach to the TransferQueue of this Ray cluster; closing leaves it running, and none is ever started."""
        import transfer_queue
        from transfer_queue import interface

        try:
            with anyio.fail_after(start_s):
                found = await anyio.to_thread.run_sync(interface._init_from_existing, abandon_on_cancel=True)
                if not found:
                    raise DataPlaneError("no TransferQueue runs on this Ray cluster; its owner has to start it first")
                options = (await interface._TQ_CONTROLLER.get_config.remote())["asyncrl"]
        except TimeoutError:
            raise Overdue(f"no TransferQueue to attach to within {start_s:g} s") from None
        client = transfer_queue.get_client()
        memory = None
        if options["memory"] is not None:
            memory = SharedMemory.open(Path(options["memory"]), options["capacity_rows"])
        return cls(client, deadline_s=deadline_s, closer=client.close, memory=memory)

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

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # An orderly end waits for processes that are gone; the cluster's own end takes the rest.
        limit = _DOWN_CLOSE_S if self._down else self._deadline_s
        with anyio.move_on_after(limit, shield=True):
            await anyio.to_thread.run_sync(self._closer, abandon_on_cancel=True)
        self._payloads.close()


def _ray_errors() -> tuple[type[BaseException], ...]:
    from ray.exceptions import RayError

    return (RayError,)


def _start_on_ray(config: dict[str, Any]) -> None:
    import ray
    import transfer_queue
    from omegaconf import OmegaConf
    from transfer_queue.controller import TransferQueueController
    from transfer_queue.storage.simple_storage import SimpleStorageUnit

    with suppress(ValueError):
        ray.get_actor("TransferQueueController", namespace="transfer_queue")
        raise DataPlaneError("a TransferQueue runs on this Ray cluster already; there can be one, and one owner")
    originals = {actor: actor.options for actor in (SimpleStorageUnit, TransferQueueController)}
    for actor, options in originals.items():
        actor.options = partial(_without_cpus, options)
    try:
        transfer_queue.init(OmegaConf.create(config, flags={"allow_objects": True}))
    finally:
        for actor, options in originals.items():
            actor.options = options


def _without_cpus(options: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return options(*args, **{**kwargs, "num_cpus": 0})
