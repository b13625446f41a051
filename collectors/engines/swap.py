"""The swap of weights in an engine whose workers load them from a file: whole, or not at all."""

from pathlib import Path
from typing import Protocol

from asyncrl.engine.errors import AsyncRLError, GenerationError, VersionError

START = 0
"""The version of the checkpoint that an engine starts with."""


class WeightLoader(Protocol):
    """An engine's weights, reached from outside. It does not generate while any of this runs."""

    async def load(self, file: Path | None) -> None:
        """Load the weights of a file, or those of the checkpoint; GenerationError if that went wrong."""

    async def differences(self, file: Path | None) -> list[str]:
        """Return which weights that compute are not those of the file (or checkpoint): empty if all are."""

    async def label(self, version: int) -> None:
        """Stamp the tokens to come with this version."""


async def swap(loader: WeightLoader, version: int, file: Path, before: Path | None, *, old: int) -> None:
    """Load `file` and prove that it computes; if that fails, load `before`, of version `old`, and raise VersionError.

    GenerationError if the old weights could not be brought back either: the engine has to end.
    """
    try:
        await _load(loader, file)
        await loader.label(version)
    except AsyncRLError as error:
        try:
            await _load(loader, before)
            # A call that nobody answered may have changed it.
            await loader.label(old)
        except AsyncRLError as second:
            raise GenerationError(
                f"version {version} could not be loaded ({error}), nor the weights before it: {second}"
            ) from second
        raise VersionError(f"version {version} was not loaded, the one before it serves on: {error}") from error


async def _load(loader: WeightLoader, file: Path | None) -> None:
    await loader.load(file)
    differing = await loader.differences(file)
    if differing:
        shown = ", ".join(differing[:6])
        raise GenerationError(
            f"the engine reported success, and {len(differing)} of its weights are not the new ones ({shown})"
        )
