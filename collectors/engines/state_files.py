"""Weights as safetensors files in shared memory, from where an engine's workers load them.

Invariant: every file holds exactly the weights of the checkpoint, by name and shape, and at most two lie there: that
of the version that serves, to go back to, and that of the next. Both go with `close`, or with the next start of
asyncrl on this host if this process is killed.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from asyncrl.engine.data_plane.shared_memory import SharedMemory
from asyncrl.engine.errors import ConfigError, VersionError
from asyncrl.engine.weights.twins import without_twins

_HEAD = "lm_head.weight"
_SHOWN = 6


class StateFiles:
    """A folder in `parent` for the weights of the checkpoint at `model_path`, written as `dtype`."""

    def __init__(self, model_path: str, dtype: torch.dtype, parent: Path) -> None:
        self._wanted = checkpoint_shapes(Path(model_path))
        self._dtype = dtype
        self._memory = SharedMemory.create(parent)
        self._served: Path | None = None

    @property
    def served(self) -> Path | None:
        """The file of the version that serves; None while it is that of the checkpoint."""
        return self._served

    def write(self, version: int, state: Mapping[str, torch.Tensor]) -> Path:
        """Write a version and return its file, `model.safetensors` in a folder of its own.

        VersionError names weights that the checkpoint has and `state` lacks, or the reverse, or of another shape.
        """
        whole = self._checked(version, state)
        folder = self._memory.path / f"version-{version}"
        folder.mkdir(exist_ok=True)
        file = folder / "model.safetensors"
        try:
            save_file(whole, file, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            self.remove(file)
            raise VersionError(f"version {version} could not be written to {folder}: {error}") from error
        return file

    def serve(self, file: Path) -> None:
        """Remember `file` as that of the version that serves, and remove the one before."""
        if self._served is not None and self._served != file:
            self.remove(self._served)
        self._served = file

    def remove(self, file: Path) -> None:
        """Remove a version's file; nothing happens if it is gone."""
        file.unlink(missing_ok=True)
        if file.parent.is_dir():
            file.parent.rmdir()

    def close(self) -> None:
        self._memory.close()

    def _checked(self, version: int, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        given = dict(state)
        # A tied model's `state_dict` names its head as well; the checkpoint, and so the engine, does not.
        if _HEAD in given and _HEAD not in self._wanted:
            del given[_HEAD]
        wrong = {
            "missing": sorted(self._wanted.keys() - given.keys()),
            "unexpected": sorted(given.keys() - self._wanted.keys()),
            "of another shape": sorted(
                name for name, shape in self._wanted.items() if name in given and tuple(given[name].shape) != shape
            ),
        }
        parts = [f"{len(names)} {kind} ({', '.join(names[:_SHOWN])})" for kind, names in wrong.items() if names]
        if parts:
            raise VersionError(f"version {version} does not fit the engine's checkpoint: {'; '.join(parts)}")
        kept, twins = without_twins(given)
        written = {name: tensor.detach().to("cpu", self._dtype).contiguous() for name, tensor in kept.items()}
        # safetensors refuses tensors that share memory.
        return written | {name: written[twin].clone() for name, twin in twins.items()}


def checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return name and shape of all weights of a checkpoint folder; ConfigError if it has no safetensors."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            shapes.update({name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()})  # noqa: SIM118
    if not shapes:
        raise ConfigError(f"{folder} holds no *.safetensors; the engine's weights could not be updated")
    return shapes
