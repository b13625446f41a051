"""Which device a rank or a collector computes on, and in what precision.

A run's ranks take the GPUs in turn, and its collectors those after them, or the same ones with time slicing.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch

from asyncrl.configs import RunConfig
from asyncrl.engine.aio.blocking import Blocking
from asyncrl.engine.errors import ConfigError

Device = Literal["auto", "cpu", "cuda"]


def choose_device(
    asked: Device, place: int, *, count_gpus: Callable[[], int] = torch.cuda.device_count
) -> torch.device:
    """Return the device of the `place`-th process of a run; `auto` is a GPU where torch sees one, else the CPU.

    ConfigError for `cuda` where torch sees no GPU.
    """
    if asked == "cpu":
        return torch.device("cpu")
    count = count_gpus()
    if count:
        return torch.device("cuda", place % count)
    if asked == "cuda":
        raise ConfigError("cuda was asked for, and torch sees no GPU here; it must be auto or cpu")
    return torch.device("cpu")


def collector_place(config: RunConfig, index: int) -> int:
    """Return the place of a collector among a run's processes: with time slicing, that of the rank it takes turns with.

    Example: with 2 ranks, collectors 0, 1 and 2 have places 2, 3 and 4; with time slicing 0, 1 and 0.
    """
    return index % config.trainer.ranks if config.cluster.time_slicing else config.trainer.ranks + index


def on_device(blocking: Blocking[Any], device: torch.device) -> Blocking[Any]:
    """Return `blocking` for calls that compute on `device`, which is then the current one.

    Streams, events and CUDA graphs are the current device's. Each thread has one of its own, at first the first GPU:
    an event there would not wait for a copy on the second.
    """
    if device.type != "cuda":
        return blocking

    async def run(call: Callable[[], Any]) -> Any:
        def there() -> Any:
            with torch.cuda.device(device):
                return call()

        return await blocking(there)

    return run


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's type of a name such as `bfloat16`."""
    found: torch.dtype = getattr(torch, name)
    return found
