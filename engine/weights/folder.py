"""Weights through a folder of safetensors files, which any program and any host that mounts it can read.

Invariant: a file that has its name is whole, and nobody writes to it again.
"""

from itertools import count
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from asyncrl.engine.aio.blocking import Blocking
from asyncrl.engine.errors import VersionError
from asyncrl.engine.weights.base import Offer, Sent, State, WeightTransport


class Folder(WeightTransport):
    """The content is the file's path. The files lie in `directory`, which its owner removes."""

    def __init__(self, directory: Path, *, blocking: "Blocking[dict[str, torch.Tensor]]") -> None:
        self._directory = directory
        self._blocking = blocking
        self._numbers = count()

    def send(self, state: State) -> Sent:
        number = next(self._numbers)
        file, hidden = self._file(number), self._directory / f".{number}.safetensors"
        # Of tensors that share memory each is written: safetensors refuses them otherwise.
        copied = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in state.items()}
        try:
            save_file(copied, hidden, metadata={"format": "pt"})
            hidden.rename(file)
        except (OSError, SafetensorError) as error:
            hidden.unlink(missing_ok=True)
            raise VersionError(f"the weights could not be written to {self._directory}: {error}") from error
        return Sent(str(file), number, file.stat().st_size)

    def forget(self, sent: Sent) -> None:
        self._file(sent.number).unlink(missing_ok=True)

    async def receive(self, offer: Offer) -> dict[str, torch.Tensor]:
        try:
            return await self._blocking(lambda: load_file(offer.content))
        except (OSError, SafetensorError) as error:
            raise VersionError(f"the weights in {offer.content} cannot be read here: {error}") from error

    def _file(self, number: int) -> Path:
        return self._directory / f"weights-{number:06d}.safetensors"
