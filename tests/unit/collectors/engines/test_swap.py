"""A swap is whole or undone; its files are those of the checkpoint, and are removed."""

from functools import partial
from pathlib import Path

import anyio
import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.collectors.engines.state_files import StateFiles
from asyncrl.collectors.engines.swap import swap
from asyncrl.engine.errors import GenerationError, VersionError

NEW, OLD = Path("new"), Path("old")


class Loader:
    """Loads, but for what is in `raises`, and holds what was loaded last, but for what is in `deaf`."""

    def __init__(self, *, raises: tuple[Path, ...] = (), deaf: tuple[Path, ...] = ()) -> None:
        self._raises, self._deaf = raises, deaf
        self.holds: Path | None = OLD
        self.version = 4

    async def load(self, file: Path | None) -> None:
        if file in self._raises:
            self.holds = None
            raise GenerationError(f"{file} is unreadable")
        if file not in self._deaf:
            self.holds = file

    async def differences(self, file: Path | None) -> list[str]:
        return [] if self.holds == file else ["lm_head"]

    async def label(self, version: int) -> None:
        self.version = version


def test_a_swap_that_took_labels_the_tokens_to_come() -> None:
    loader = Loader()
    anyio.run(partial(swap, loader, 5, NEW, OLD, old=4))
    assert (loader.holds, loader.version) == (NEW, 5)


@pytest.mark.parametrize("fault", [{"raises": (NEW,)}, {"deaf": (NEW,)}])
def test_a_swap_that_did_not_take_is_undone(fault: dict[str, tuple[Path, ...]]) -> None:
    loader = Loader(**fault)
    with pytest.raises(VersionError, match="version 5"):
        anyio.run(partial(swap, loader, 5, NEW, OLD, old=4))
    assert (loader.holds, loader.version) == (OLD, 4)


def test_a_label_that_nobody_confirmed_is_taken_back_with_the_weights() -> None:
    """Its tokens would look younger than they are."""

    class Silent(Loader):
        async def label(self, version: int) -> None:
            await super().label(version)
            if version == 5:
                raise GenerationError("no answer")

    loader = Silent()
    with pytest.raises(VersionError, match="no answer"):
        anyio.run(partial(swap, loader, 5, NEW, OLD, old=4))
    assert (loader.holds, loader.version) == (OLD, 4)


def test_an_engine_that_takes_neither_has_to_end() -> None:
    with pytest.raises(GenerationError, match="nor the weights before it"):
        anyio.run(partial(swap, Loader(raises=(NEW, OLD)), 5, NEW, OLD, old=4))


@pytest.fixture
def files(tmp_path: Path) -> StateFiles:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    save_file({"embed.weight": torch.zeros(4, 2), "norm.weight": torch.zeros(2)}, checkpoint / "model.safetensors")
    return StateFiles(str(checkpoint), torch.bfloat16, tmp_path)


def state(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"embed.weight": torch.ones(4, 2), "norm.weight": torch.ones(2), **more}


def test_weights_are_written_in_the_engines_dtype_and_a_tied_head_only_once(files: StateFiles) -> None:
    tied = state()
    written = load_file(files.write(1, {**tied, "lm_head.weight": tied["embed.weight"]}))
    assert sorted(written) == ["embed.weight", "norm.weight"]
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}


def test_a_head_that_the_checkpoint_has_beside_the_embedding_is_written_too(tmp_path: Path) -> None:
    """They arrive as one tensor, which safetensors would refuse."""
    names = ("embed.weight", "lm_head.weight", "norm.weight")
    save_file({name: torch.zeros(2, 2) for name in names}, tmp_path / "model.safetensors")
    files, tied = StateFiles(str(tmp_path), torch.float32, tmp_path), torch.rand(2, 2)
    written = load_file(files.write(1, dict.fromkeys(names, tied)))
    files.close()
    assert written.keys() == set(names)
    assert all(torch.equal(value, tied) for value in written.values())


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"norm.weight": torch.ones(2)}, "1 missing .embed.weight"),
        (state(other=torch.ones(1)), "1 unexpected .other"),
        (state(**{"norm.weight": torch.ones(3)}), "1 of another shape .norm.weight"),
    ],
)
def test_weights_that_are_not_the_checkpoints_are_named(
    files: StateFiles, wrong: dict[str, torch.Tensor], named: str
) -> None:
    with pytest.raises(VersionError, match=named):
        files.write(1, wrong)


def test_at_most_two_versions_lie_there_and_none_after_the_end(files: StateFiles, tmp_path: Path) -> None:
    for version in range(1, 4):
        file = files.write(version, state())
        assert len(list(tmp_path.glob("asyncrl-*/version-*"))) <= 2
        files.serve(file)
    assert files.served is not None
    assert files.served.parent.name == "version-3"
    files.close()
    assert not list(tmp_path.glob("asyncrl-*"))
