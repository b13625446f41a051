"""Weights through a file in shared memory, which receivers of this host map without a copy.

Invariant: a file that has its name is whole, and nobody writes to it again. Who maps it keeps its pages, also after it
is removed. Writing or cutting a mapped file would change weights that serve, or kill the process that reads them.
"""

from itertools import count
from pathlib import Path

import torch

from asyncrl.engine.errors import VersionError
from asyncrl.engine.weights.base import Offer, Sent, State, WeightTransport
from asyncrl.engine.weights.flat import Layout


class SharedFile(WeightTransport):
    """The content is (file, layout). The files lie in `directory`, which its owner removes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers = count()

    def send(self, state: State) -> Sent:
        layout, number = Layout.of(state), next(self._numbers)
        file, hidden = self._file(number), self._directory / f".weights-{number}"
        try:
            _write(hidden, layout, state)
            hidden.rename(file)
        except OSError as error:
            hidden.unlink(missing_ok=True)
            raise VersionError(
                f"{layout.bytes} bytes of weights could not be written to {self._directory}: {error}; "
                "make room there, or set trainer.weight_transport to object_store"
            ) from error
        return Sent((str(file), layout), number, layout.bytes)

    def forget(self, sent: Sent) -> None:
        self._file(sent.number).unlink(missing_ok=True)

    async def receive(self, offer: Offer) -> dict[str, torch.Tensor]:
        file, layout = offer.content
        try:
            # Private: what anybody should write into it by mistake stays with him.
            flat = torch.from_file(file, shared=False, size=layout.bytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise VersionError(f"the weights in {file} cannot be read on this host: {error}") from error
        views: dict[str, torch.Tensor] = layout.views(flat)
        return views

    def _file(self, number: int) -> Path:
        return self._directory / f"weights-{number}"


def _write(file: Path, layout: Layout, state: State) -> None:
    """Write tensors where the layout says.

    OSError without room; writing through a mapping would kill the process then.
    """
    with file.open("xb") as out:
        for name, start in layout.starts.items():
            out.seek(start)
            tensor = state[name].detach().cpu().contiguous().reshape(-1)
            out.write(tensor.view(torch.uint8).numpy().data)
        out.truncate(layout.bytes)
