"""A head that is tied to the embedding goes to the collectors once, and arrives under both its names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from torch import nn

from asyncrl.engine.aio.blocking import in_place
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.weights.base import InProcess, WeightTransport
from asyncrl.engine.weights.delta import Delta
from asyncrl.engine.weights.digest import digest
from asyncrl.engine.weights.folder import Folder
from asyncrl.engine.weights.shared_file import SharedFile
from asyncrl.engine.weights.twins import with_twins, without_twins
from asyncrl.trainers.rank import RankSettings, TrainerRank
from asyncrl.trainers.reducer import Alone

WIDTH, VOCABULARY = 8, 40
TABLE_BYTES, NORM_BYTES = 2 * WIDTH * VOCABULARY, 2 * WIDTH


class Tied(nn.Module):
    """An embedding that is the output layer too, in float32; it is sent as bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.embed.weight


WAYS: dict[str, Callable[[Path], WeightTransport]] = {
    "in_process": lambda _: InProcess(),
    "shared_file": SharedFile,
    "folder": lambda folder: Folder(folder, blocking=in_place),
}


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_tied_head_is_sent_once_and_has_both_names_where_it_arrives(
    way: str, delta: bool, tmp_path: Path, make_backend: Any
) -> None:
    def build() -> WeightTransport:
        plain = WAYS[way](tmp_path)
        return Delta(plain, blocking=in_place) if delta else plain

    async def main() -> None:
        backend, receiver = make_backend(Tied(), compute_dtype=torch.bfloat16), build()
        rank = TrainerRank(
            RankSettings(0, 1, "train", learning_rate=0.1),
            backend=backend,
            plane=LocalPlane(),
            reducer=Alone(),
            transport=build(),
            blocking=in_place,
        )
        for version in range(2):
            sent = await rank.weights()
            assert sent.twins == {"lm_head.weight": "embed.weight"}
            if not (delta and version):
                # Layouts round up to 64 bytes per tensor, a safetensors file has a header.
                assert TABLE_BYTES + NORM_BYTES <= sent.bytes < TABLE_BYTES + NORM_BYTES + 300
            offer = await rank.offer(sent, ["collector0"])
            state = with_twins(await receiver.receive(offer), offer.twins)
            expected = backend.state()
            assert state.keys() == expected.keys() == {"embed.weight", "norm.weight", "lm_head.weight"}
            assert all(torch.equal(state[name], value) for name, value in expected.items())
            assert digest(state) == await rank.digest()
            backend.apply(torch.ones_like(backend.gradients()), learning_rate=0.1)

    anyio.run(main)


def test_a_cast_keeps_tied_weights_one_tensor(make_backend: Any) -> None:
    state = make_backend(Tied(), compute_dtype=torch.bfloat16).state()
    assert state["lm_head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    assert state["lm_head.weight"].dtype == torch.bfloat16


def test_views_of_other_shapes_and_empty_tensors_are_not_twins() -> None:
    table = torch.arange(16.0).reshape(4, 4)
    state = {"a": table, "turned": table.t(), "row": table[0], "none": torch.zeros(0), "nothing": torch.zeros(0)}
    kept, twins = without_twins({**state, "b": table})
    assert twins == {"b": "a"}
    assert kept.keys() == state.keys()
