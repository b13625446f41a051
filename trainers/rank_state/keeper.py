"""Holds a rank's state for a checkpoint, writes it, and puts a saved one back.

Invariant: what is written is of one version, the one that was held, whatever is trained meanwhile.
"""

import math
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from asyncrl.engine.errors import AsyncRLError, NotWritten
from asyncrl.trainers.backends.base import Place, Stateful
from asyncrl.trainers.rank_state.host_copy import HostCopy
from asyncrl.trainers.rank_state.index import FORMAT, Index, RandomStates
from asyncrl.trainers.rank_state.random_states import random_states, restore_random
from asyncrl.trainers.rank_state.saved import SavedState
from asyncrl.trainers.rank_state.shards import SHARD_BYTES, crc32_of, write_shards


@dataclass(frozen=True, slots=True)
class _Held:
    version: int
    tensors: Mapping[str, torch.Tensor]
    frozen: Mapping[str, torch.Tensor]
    random: RandomStates
    places: Mapping[str, Place]


def _detached(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


class StateKeeper:
    """Of rank `rank` among `ranks`. Replicas are equal: one is written, by the rank or the ranks that hold it.

    So rank 0 writes what is whole, others the parts that are theirs, and every rank its random states.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        *,
        shard_bytes: int = SHARD_BYTES,
        free_bytes: Callable[[Path], int] = _free_bytes,
    ) -> None:
        self._rank = rank
        self._ranks = ranks
        self._shard_bytes = shard_bytes
        self._free_bytes = free_bytes
        self._copy = HostCopy()
        self._held: _Held | None = None
        self._frozen_sums: dict[str, int] | None = None

    def reserve(self, backend: Stateful) -> None:
        """Take the host memory that `hold` copies to, so that no step waits for it."""
        state = backend.training_state()
        self._copy.reserve(self._written(state.tensors, state.places))

    def hold(self, backend: Stateful, version: int) -> None:
        """Copy the state to host memory, in place of the one that was held."""
        self._held = None  # Its buffers are written over: a copy that fails must not be taken for the version before.
        state = backend.training_state()
        random = random_states(state.device)
        changing, constant = (self._written(tensors, state.places) for tensors in (state.tensors, state.constant))
        frozen = state.frozen if self._rank == 0 else {}
        # Detached, what never changes can be read where it is now, though the rank moves its own meanwhile.
        held = {**self._copy.take(changing), **_detached(constant)}
        self._held = _Held(version, held, _detached(frozen), random, state.places)

    def save(self, folder: Path) -> None:
        """Write this rank's part of the held state, synced; also twice. NotWritten if the disk refuses."""
        held = self._held
        if held is None:
            raise AsyncRLError(f"rank{self._rank} was asked to save its state, and holds none")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._remove_own(folder)
            self._check_room(folder, held)
            entries = write_shards(
                held.tensors, folder, stem=self._stem, shard_bytes=self._shard_bytes, places=held.places
            )
            index = Index(FORMAT, self._rank, self._ranks, held.version, entries, self._sums(held.frozen), held.random)
            _sync(index.write(folder))
            _sync(folder)
        except OSError as error:
            self._remove_own(folder)
            raise NotWritten.of(folder, error) from error

    def load(self, folder: Path, backend: Stateful) -> int:
        """Put a saved state back, of however many ranks; return its version.

        A rank that was not there keeps its random states. CheckpointBroken names file and tensor. After an error the
        backend's state may be of no version.
        """
        saved = SavedState(folder)
        backend.load_training_state(saved)
        device = backend.training_state().device  # All ranks ask, because those with parts join them for an answer.
        random = saved.random(self._rank)
        if random is not None:
            restore_random(random, device)
        return saved.version

    def _written(self, tensors: Mapping[str, torch.Tensor], places: Mapping[str, Place]) -> dict[str, torch.Tensor]:
        """Return those that this rank writes: of whole ones rank 0 all, of parts each rank its own."""

        def writes(place: Place | None) -> bool:
            return self._rank == 0 if place is None else place.saves

        return {name: value for name, value in tensors.items() if writes(places.get(name))}

    @property
    def _stem(self) -> str:
        return f"rank-{self._rank:05}"

    def _remove_own(self, folder: Path) -> None:
        """Remove what a try before this one left: its index would name files that are written anew."""
        for path in folder.glob(f"{self._stem}*"):
            with suppress(OSError):
                path.unlink()

    def _check_room(self, folder: Path, held: _Held) -> None:
        """OSError if the disk is too small. To find out by filling it would take the event log's last bytes, too.

        All ranks write at the same time, so each counts whole tensors, and what the others have written already.
        """
        wholes = {name: math.prod(place.shape) for name, place in held.places.items()}
        needed = sum(wholes.get(name, one.numel()) * one.itemsize for name, one in held.tensors.items())
        free = self._free_bytes(folder) + sum(path.stat().st_size for path in folder.iterdir())
        if free < needed:
            raise OSError(f"the state needs {needed / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free")

    def _sums(self, frozen: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Weights that are never trained have one checksum for the whole run."""
        if self._frozen_sums is None or set(self._frozen_sums) != set(frozen):
            self._frozen_sums = {name: crc32_of(tensor) for name, tensor in frozen.items()}
        return self._frozen_sums


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
