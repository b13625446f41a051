"""How fast a version travels from the trainer's process to a collector's on one host, by each transport, in one run.

The state has the shape of SmolLM2-135M in bfloat16. `publish_s` is from the state on the sender to weights that the
receiver has copied to memory of its own, as every engine does: `send_s`, `receive_s` and `copy_s`, and what Ray needs
in between. Transports take turns; the first round is not counted, figures are medians of `--repeats` others.
`ratio` is the object store's seconds over the transport's. `delta` sends what one step changed.

A step is AdamW's with `--learning-rate` on float32 masters, after `--steps` steps with random gradients that give it
moments; `changed_fraction` is the share of bfloat16 weights that it changes. The last line is one JSON object.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio

from asyncrl.engine.lifecycle.process_env import prepare

WAYS = ("object_store", "shared_memory", "folder", "gloo", "delta")
VOCABULARY, WIDTH, LAYERS, INNER, KEYS = 49_152, 576, 30, 1536, 192


def shapes() -> dict[str, tuple[int, ...]]:
    """Return name and shape of SmolLM2-135M's weights."""
    found: dict[str, tuple[int, ...]] = {"embed": (VOCABULARY, WIDTH), "norm": (WIDTH,)}
    for layer in range(LAYERS):
        one = {"q": (WIDTH, WIDTH), "k": (KEYS, WIDTH), "v": (KEYS, WIDTH), "o": (WIDTH, WIDTH)}
        inner = {"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}
        found |= {f"{layer}.{name}": shape for name, shape in {**one, **inner, "n1": (WIDTH,), "n2": (WIDTH,)}.items()}
    return found


class End:
    """A process at one end, with all transports."""

    def __init__(self, name: str, meeting: str, folder: str, memory: str, threads: int) -> None:
        import torch

        from asyncrl.engine.aio.blocking import in_thread
        from asyncrl.engine.weights.broadcast import Broadcast
        from asyncrl.engine.weights.delta import Delta
        from asyncrl.engine.weights.folder import Folder
        from asyncrl.engine.weights.ray_store import RayObjectStore
        from asyncrl.engine.weights.shared_file import SharedFile

        torch.set_num_threads(threads)
        cpu = torch.device("cpu")
        self._ways: dict[str, Any] = {
            "object_store": RayObjectStore(),
            "shared_memory": SharedFile(Path(memory)),
            "folder": Folder(Path(folder), blocking=in_thread),
            "gloo": Broadcast(name, meeting, backend="gloo", device=cpu, timeout_s=120.0, blocking=in_thread),
            "delta": Delta(RayObjectStore(), blocking=in_thread),
        }
        self._before: dict[str, Any] = {}

    async def make(self, steps: int, learning_rate: float) -> dict[str, float]:
        """Make weights and let an optimizer get its moments; return how many weights there are."""
        import torch

        torch.manual_seed(0)
        self._masters = {
            name: torch.nn.Parameter(torch.randn(shape) * 0.02 if len(shape) > 1 else torch.ones(shape))
            for name, shape in shapes().items()
        }
        self._optimizer = torch.optim.AdamW(
            self._masters.values(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        for _ in range(steps):
            self._step()
        return {"weights": sum(master.numel() for master in self._masters.values())}

    async def step(self) -> float:
        """Take a step; return the share of bfloat16 weights that it changed."""
        before = self._state
        self._step()
        changed = sum(int((before[name] != new).sum()) for name, new in self._state.items())
        return changed / sum(new.numel() for new in before.values())

    def _step(self) -> None:
        import torch

        for master in self._masters.values():
            master.grad = torch.randn_like(master)
        self._optimizer.step()
        self._state = {name: master.detach().to(torch.bfloat16) for name, master in self._masters.items()}

    async def send(self, way: str) -> tuple[Any, Any, float]:
        """Send the state; return what was sent, the offer and the seconds."""
        transport = self._ways[way]
        started = time.perf_counter()
        sent = await anyio.to_thread.run_sync(transport.send, self._state)
        seconds = time.perf_counter() - started
        if way in self._before:
            transport.forget(self._before[way])
        self._before[way] = sent
        return sent, transport.offer(sent, ["receiver"]), seconds

    async def serve(self, way: str, offer: Any) -> None:
        if offer.meets:
            await anyio.to_thread.run_sync(self._ways[way].serve, offer)

    async def receive(self, way: str, offer: Any) -> tuple[float, float]:
        """Receive and copy; return the seconds of each."""
        started = time.perf_counter()
        state = await self._ways[way].receive(offer)
        received = time.perf_counter()
        self._staged = {name: tensor.clone() for name, tensor in state.items()}
        return received - started, time.perf_counter() - received


async def measure(given: argparse.Namespace) -> dict[str, Any]:
    import ray

    from asyncrl.engine.data_plane.shared_memory import SharedMemory, shared_directory
    from asyncrl.engine.lifecycle.ray_runtime import ray_cluster
    from asyncrl.trainers.reducer import MeetingPoint

    seconds: dict[str, dict[str, list[float]]] = {way: {} for way in WAYS}
    sizes, changed = dict.fromkeys(WAYS, 0), []
    meeting = MeetingPoint()
    with tempfile.TemporaryDirectory() as folder:
        memory = SharedMemory.create(shared_directory("auto") or Path(folder))
        try:
            async with ray_cluster():
                actor = ray.remote(num_cpus=0)(End)
                ends = [
                    actor.remote(name, meeting.address, folder, str(memory.path), given.threads)
                    for name in ("sender", "receiver")
                ]
                sender, receiver = ends
                count = await sender.make.remote(given.steps, given.learning_rate)
                for number in range(given.repeats + 1):
                    changed.append(await sender.step.remote())
                    for way in WAYS:
                        started = time.perf_counter()
                        sent, offer, send_s = await sender.send.remote(way)
                        serving = sender.serve.remote(way, offer)
                        receive_s, copy_s = await receiver.receive.remote(way, offer)
                        await serving
                        taken = {"send_s": send_s, "receive_s": receive_s, "copy_s": copy_s}
                        taken["publish_s"] = time.perf_counter() - started
                        sizes[way] = sent.bytes
                        if number:
                            for name, value in taken.items():
                                seconds[way].setdefault(name, []).append(value)
        finally:
            memory.close()
    middle = {
        way: {name: statistics.median(values) for name, values in figures.items()} for way, figures in seconds.items()
    }
    base = middle["object_store"]["publish_s"]
    return {
        **count,
        "repeats": given.repeats,
        "learning_rate": given.learning_rate,
        "changed_fraction": round(statistics.median(changed), 6),
        "delta_byte_fraction": round(sizes["delta"] / sizes["object_store"], 6),
        "bytes": sizes,
        "ratio": {way: round(base / figures["publish_s"], 3) for way, figures in middle.items()},
        "seconds": {way: {name: round(value, 4) for name, value in figs.items()} for way, figs in middle.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps before the first one that is sent")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each process")
    given = parser.parse_args()
    prepare(threads=given.threads)
    print(json.dumps(anyio.run(measure, given)))


if __name__ == "__main__":
    main()
