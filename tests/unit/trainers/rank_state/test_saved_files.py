"""The files of a saved state: whole and joined from parts, or refused by the name of file and tensor."""

import json
import shutil
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file

from asyncrl.engine.errors import AsyncRLError, CheckpointBroken, NotWritten
from asyncrl.trainers.backends.base import Place, TrainingState
from asyncrl.trainers.rank_state.host_copy import HostCopy
from asyncrl.trainers.rank_state.index import FORMAT, Entry, Index, Part
from asyncrl.trainers.rank_state.keeper import StateKeeper
from asyncrl.trainers.rank_state.random_states import random_states
from asyncrl.trainers.rank_state.saved import SavedState
from asyncrl.trainers.rank_state.shards import DTYPES, write_shards

CPU = torch.device("cpu")
RANDOM = random_states(CPU)


@dataclass
class Tensors:
    """A backend that has only tensors."""

    tensors: dict[str, torch.Tensor]
    frozen: dict[str, torch.Tensor]
    places: dict[str, Place] = field(default_factory=dict)

    def training_state(self) -> TrainingState:
        return TrainingState(self.tensors, {}, self.frozen, torch.device("cpu"), self.places)

    def load_training_state(self, saved: SavedState) -> None:
        saved.check(self.tensors, self.frozen)
        for name, tensor in self.tensors.items():
            saved.read_into(name, tensor)


def some(fill: float = 1.0) -> Tensors:
    tensors = {
        "a": torch.arange(12.0).reshape(4, 3) * fill,
        "b": torch.full((5,), fill, dtype=torch.bfloat16),
        "step": torch.tensor(7.0 * fill),
        "none": torch.zeros(0, 3),
        "flags": torch.tensor([True, False, True]),
    }
    return Tensors(tensors, {"base": torch.ones(2)})


def save(folder: Path, backend: Any = None, *, ranks: int = 1, version: int = 3, shard_bytes: int = 40) -> None:
    for rank in range(ranks):
        keeper = StateKeeper(rank, ranks, shard_bytes=shard_bytes)
        keeper.hold(backend or some(), version)
        keeper.save(folder)


def load(folder: Path, backend: Any = None, rank: int = 0) -> int:
    return StateKeeper(rank, 1).load(folder, backend or some(0.0))


def change_index(folder: Path, change: Callable[[dict[str, Any]], None], rank: int = 0) -> None:
    """Change an index, and give it the right checksum."""
    path = folder / f"rank-{rank:05}.json"
    body = json.loads(path.read_text())["index"]
    change(body)
    path.write_text(json.dumps({"crc32": _checksum(body), "index": body}))


def _checksum(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def test_what_was_saved_comes_back_in_several_files_of_safetensors_format(tmp_path: Path) -> None:
    save(tmp_path, ranks=2)
    backend = some(0.0)
    assert load(tmp_path, backend) == 3
    for name, value in some().tensors.items():
        assert torch.equal(value, backend.tensors[name])
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 2
    assert sorted(path.name for path in tmp_path.iterdir() if path not in files) == [
        "rank-00000.json",
        "rank-00001.json",
    ]
    found = [load_file(file) for file in files]
    assert torch.equal(torch.cat([one["a"] for one in found if "a" in one]), some().tensors["a"])
    assert sum(value.nbytes for value in found[0].values()) <= 40


def test_a_tensor_in_two_parts_of_two_ranks_is_joined(tmp_path: Path) -> None:
    """Hand-made, as ranks would write it that each hold columns of a matrix."""
    whole = torch.arange(10.0).reshape(2, 5)
    for rank, (begin, end) in enumerate([(0, 2), (2, 5)]):
        entries = write_shards({"w": whole[:, begin:end]}, tmp_path, stem=f"rank-{rank:05}")
        (part,) = entries["w"].parts
        entry = Entry("F32", (2, 5), (Part(part.file, (0, begin), (2, end - begin), part.crc32),))
        Index(FORMAT, rank, 2, 3, {"w": entry}, {}, RANDOM).write(tmp_path)
    backend = Tensors({"w": torch.zeros(2, 5)}, {})
    assert load(tmp_path, backend) == 3
    assert torch.equal(backend.tensors["w"], whole)
    change_index(tmp_path, lambda body: body["tensors"]["w"]["parts"][0].update(offsets=[0, 1]), rank=1)
    with pytest.raises(CheckpointBroken, match=r"w is not whole: its parts at \[0, 0\] and \[0, 1\] overlap"):
        load(tmp_path, backend)
    change_index(tmp_path, lambda body: body["tensors"].clear(), rank=1)
    with pytest.raises(CheckpointBroken, match="w is not whole: its parts have 4 of 10 elements"):
        load(tmp_path, backend)


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[torch.Tensor, list[tuple[slice, ...]]]:
    """A tensor of up to three dimensions, and boxes of a grid that are all of it."""
    shape = draw(st.lists(st.integers(1, 5), max_size=3))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    boxes = [tuple(slice(a, b) for a, b in box) for box in product(*(list(pairwise(cut)) for cut in cuts))]
    values = torch.arange(int(torch.tensor(shape).prod()) if shape else 1)
    return values.reshape(shape).to(dtype), boxes


@given(cut=cut_tensors(), data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_boxes_that_are_all_of_a_tensor_are_joined_and_one_less_is_refused(
    cut: tuple[torch.Tensor, list[tuple[slice, ...]]], data: st.DataObject, tmp_path_factory: Any
) -> None:
    whole, boxes = cut
    folder = tmp_path_factory.mktemp("state")
    order = data.draw(st.permutations(boxes))
    without = data.draw(st.sampled_from([None, *range(len(order))]))
    kept = [box for i, box in enumerate(order) if i != without]
    for rank, box in enumerate(kept):
        entries = write_shards({"w": whole[box]}, folder, stem=f"rank-{rank:05}", shard_bytes=10**6)
        (part,) = entries["w"].parts
        placed = Part(part.file, tuple(one.start for one in box), part.shape, part.crc32)
        entry = Entry(DTYPES[whole.dtype], tuple(whole.shape), (placed,))
        Index(FORMAT, rank, len(kept), 0, {"w": entry}, {}, RANDOM).write(folder)
    backend = Tensors({"w": torch.zeros_like(whole)}, {})
    try:
        load(folder, backend)
        assert without is None
        assert torch.equal(backend.tensors["w"], whole)
    except CheckpointBroken:
        assert without is not None
    shutil.rmtree(folder)


@given(
    shapes=st.lists(st.lists(st.integers(0, 6), max_size=3), min_size=1, max_size=4),
    shard_bytes=st.integers(1, 200),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
)
@settings(max_examples=25, deadline=None)
def test_tensors_of_any_shapes_come_back_from_files_of_any_size(
    shapes: list[list[int]], shard_bytes: int, dtype: torch.dtype, tmp_path_factory: Any
) -> None:
    folder = tmp_path_factory.mktemp("state")
    tensors = {str(i): torch.randint(0, 9, shape).to(dtype) for i, shape in enumerate(shapes)}
    save(folder, Tensors({**tensors, "step": torch.tensor(2.0)}, {}), shard_bytes=shard_bytes)
    backend = Tensors({name: torch.ones_like(one) for name, one in tensors.items()} | {"step": torch.tensor(0.0)}, {})
    load(folder, backend)
    assert all(torch.equal(value, backend.tensors[name]) for name, value in tensors.items())
    shutil.rmtree(folder)


def _cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def _flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def _replace(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


def _header(path: Path, header: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header)


FIRST = "rank-00000-1.safetensors"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no index": (lambda f: (f / "rank-00000.json").unlink(), "rank-00000.json is missing"),
    "no index of rank 1": (lambda f: (f / "rank-00001.json").unlink(), "rank-00001.json is missing"),
    "an index too many": (
        lambda f: shutil.copy(f / "rank-00001.json", f / "rank-00002.json"),
        "rank-00002.json is of no rank: the state is of 2",
    ),
    "two saves mixed": (
        lambda f: change_index(f, lambda body: body.update(version=4), rank=1),
        "rank-00001.json is of rank 1 of 2 at version 4; that of rank 0 is of 2 ranks at version 3",
    ),
    "an index cut": (lambda f: _cut(f / "rank-00000.json", 500), "rank-00000.json cannot be read"),
    "an empty index": (lambda f: _cut(f / "rank-00000.json", 0), "rank-00000.json cannot be read"),
    "a digit of the index": (
        lambda f: _replace(f / "rank-00000.json", '"version": 3', '"version": 4'),
        "rank-00000.json is damaged",
    ),
    "a later format": (lambda f: change_index(f, lambda body: body.update(format=2)), "format 2; this asyncrl reads"),
    "no index at all": (lambda f: change_index(f, lambda body: body.pop("tensors")), "rank-00000.json is not an index"),
    "no file": (lambda f: (f / FIRST).unlink(), f"{FIRST} is missing"),
    "a file cut": (lambda f: _cut(f / FIRST, (f / FIRST).stat().st_size - 1), f"{FIRST} is damaged: it has"),
    "an empty file": (lambda f: _cut(f / FIRST, 0), f"{FIRST} is damaged: it has 0 bytes"),
    "a longer file": (lambda f: (f / FIRST).write_bytes((f / FIRST).read_bytes() + b"0"), f"{FIRST} is damaged"),
    "a bit of a tensor": (lambda f: _flip(f / FIRST, -1), f"{FIRST} is damaged at a: its CRC-32 is"),
    "a huge header": (lambda f: (f / FIRST).write_bytes(b"\xff" * 64), f"{FIRST} is damaged"),
    "a header of no JSON": (lambda f: _header(f / FIRST, b"{nothing"), f"{FIRST} is damaged: its header"),
    "a header of other tensors": (lambda f: _header(f / FIRST, b"{}"), f"{FIRST} does not hold a"),
    "a tensor outside its file": (
        lambda f: _header(f / FIRST, b'{"a":{"dtype":"F32","shape":[3,3],"data_offsets":[0,36]}}'),
        f"{FIRST} is damaged",
    ),
    "a part of another shape": (
        lambda f: change_index(f, lambda body: body["tensors"]["a"]["parts"][0].update(shape=[2, 3])),
        "a is not whole",
    ),
    "a file elsewhere": (
        lambda f: change_index(f, lambda body: body["tensors"]["step"]["parts"][0].update(file="../x.safetensors")),
        "'../x.safetensors' is not the name of a file",
    ),
    "an unknown type": (
        lambda f: change_index(f, lambda body: body["tensors"]["a"].update(dtype="F13")),
        "a has the unknown type 'F13'",
    ),
    "a random state of NumPy": (
        lambda f: change_index(f, lambda body: body["random"]["numpy"][1].pop()),
        "random state cannot be restored",
    ),
    "a random state": (
        lambda f: change_index(f, lambda body: body["random"].update(torch="00ff")),
        "random state cannot be restored",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_state_is_refused_by_the_name_of_the_file(name: str, tmp_path: Path) -> None:
    damage, message = DAMAGES[name]
    save(tmp_path, ranks=2)
    damage(tmp_path)
    with pytest.raises(CheckpointBroken) as error:
        load(tmp_path)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: run.tensors.update(a=torch.zeros(3, 4)), r"a is F32 \[4, 3\]; the run's is F32 \[3, 4\]"),
        (lambda run: run.tensors.update(a=torch.zeros(4, 3).double()), r"a is F32 \[4, 3\]; the run's is F64 \[4, 3\]"),
        (lambda run: run.tensors.pop("a"), "rank-00000.json has unknown tensors: a;"),
        (lambda run: run.tensors.update(c=torch.zeros(1)), "rank-00000.json lacks tensors: c;"),
        (lambda run: run.frozen.clear(), "has unknown frozen tensors: base"),
        (lambda run: run.frozen.update(base=torch.zeros(2)), "frozen weight base is another one now"),
    ],
)
def test_a_state_of_another_model_is_refused_before_anything_is_changed(
    change: Callable[[Tensors], Any], message: str, tmp_path: Path
) -> None:
    save(tmp_path)
    run = some(0.0)
    change(run)
    with pytest.raises(CheckpointBroken, match=message):
        load(tmp_path, run)
    assert float(run.tensors["step"]) == 0


def test_a_save_that_fails_can_be_tried_again_and_leaves_nothing(tmp_path: Path) -> None:
    keeper, second = StateKeeper(0, 1, shard_bytes=40), "rank-00000-2.safetensors"
    with pytest.raises(AsyncRLError, match="rank0 was asked to save its state, and holds none"):
        keeper.save(tmp_path)
    keeper.hold(some(), 1)
    keeper.save(tmp_path / "a")
    (tmp_path / "a" / second).unlink()
    (tmp_path / "a" / second / "inside").mkdir(parents=True)
    with pytest.raises(NotWritten, match=second):
        keeper.save(tmp_path / "a")
    assert [path.name for path in (tmp_path / "a").iterdir()] == [second]
    keeper.save(tmp_path / "b")
    assert load(tmp_path / "b") == 1


def test_a_disk_without_room_is_told_before_it_is_filled(tmp_path: Path) -> None:
    free = [47]
    keeper = StateKeeper(0, 1, free_bytes=lambda _: free[0])
    keeper.hold(Tensors({"a": torch.zeros(12)}, {}), 1)
    with pytest.raises(NotWritten, match=r"the state needs \d\.\d MB, and 0\.0 MB are free"):
        keeper.save(tmp_path)
    assert list(tmp_path.iterdir()) == []
    free[0] = 48
    keeper.save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_disk_without_room_for_the_parts_of_all_ranks_is_told_before_it_is_filled(tmp_path: Path) -> None:
    """Two ranks write half of 80 bytes each at the same time; what the first has written is no longer free."""

    def keeper(rank: int, free: int) -> StateKeeper:
        made = StateKeeper(rank, 2, free_bytes=lambda _: free)
        places = {"a": Place((20,), (10 * rank,))}
        made.hold(Tensors({"a": torch.zeros(10)}, {}, places=places), 1)
        return made

    for rank in range(2):
        with pytest.raises(NotWritten, match="the state needs"):
            keeper(rank, 79).save(tmp_path)
    keeper(0, 80).save(tmp_path)
    written = sum(path.stat().st_size for path in tmp_path.iterdir())
    with pytest.raises(NotWritten, match="the state needs"):
        keeper(1, 79 - written).save(tmp_path)
    keeper(1, 80 - min(written, 80)).save(tmp_path)


def test_a_copy_that_fails_is_not_saved_as_the_version_before(tmp_path: Path) -> None:
    keeper = StateKeeper(0, 1)
    keeper.hold(some(), 1)
    with pytest.raises(AttributeError):
        keeper.hold(Tensors({"a": None}, {}), 2)  # type: ignore[dict-item]
    with pytest.raises(AsyncRLError, match="holds none"):
        keeper.save(tmp_path)


def test_buffers_of_a_copy_serve_again_while_shapes_stay() -> None:
    copy, tensors = HostCopy(), {"a": torch.ones(3), "b": torch.ones(2)}
    first = {name: value.data_ptr() for name, value in copy.take(tensors).items()}
    tensors["a"].mul_(2)
    tensors["b"] = torch.ones(4)
    again = copy.take(tensors)
    assert again["a"].data_ptr() == first["a"] != tensors["a"].data_ptr()
    assert again["a"].tolist() == [2, 2, 2]
    assert again["b"].tolist() == [1, 1, 1, 1]


def test_a_copy_goes_to_the_memory_that_was_reserved_for_it() -> None:
    copy, tensors = HostCopy(), {"a": torch.ones(3), "b": torch.ones(2)}
    copy.reserve(tensors)
    kept = dict(copy._buffers)
    copy.reserve(tensors)
    assert copy.take(tensors)["a"].tolist() == [1, 1, 1]
    assert all(copy._buffers[name] is kept[name] for name in tensors)


def test_a_keeper_reserves_what_it_writes() -> None:
    """Of whole tensors rank 0 all, of parts each its own."""
    whole = StateKeeper(1, 2)
    whole.reserve(some())
    assert not whole._copy._buffers
    parts = StateKeeper(1, 2)
    parts.reserve(in_parts(2, 1))
    assert set(parts._copy._buffers) == {"w"}


@dataclass
class Parts(Tensors):
    """A backend that has parts of tensors, at their places."""

    def load_training_state(self, saved: SavedState) -> None:
        saved.check(self.tensors, self.frozen, self.places)
        for name, tensor in self.tensors.items():
            saved.read_into(name, tensor, self.places.get(name))


def in_parts(ranks: int, rank: int, fill: float = 1.0, *, saves: bool = True) -> Parts:
    """Rank `rank` of `ranks` with its rows of (5, 3) numbers, and a count that all have."""
    rows = -(-5 // ranks)
    whole = torch.arange(15.0).reshape(5, 3) * fill
    begin = min(5, rows * rank)
    tensors = {"w": whole[begin : begin + rows].clone(), "step": torch.tensor(7.0 * fill)}
    return Parts(tensors, {}, {"w": Place((5, 3), (begin, 0), saves)})


@pytest.mark.parametrize("shard_bytes", [12, 1000])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("loaded", [1, 2, 3, 4])
def test_parts_of_so_many_ranks_are_loaded_into_parts_of_others(
    tmp_path: Path, ranks: int, loaded: int, shard_bytes: int
) -> None:
    """The last of four has none of five rows. A second replica of each part saves nothing of it."""
    for rank in range(2 * ranks):
        keeper = StateKeeper(rank, 2 * ranks, shard_bytes=shard_bytes)
        keeper.hold(in_parts(ranks, rank % ranks, saves=rank < ranks), 3)
        keeper.save(tmp_path)
    for rank in range(loaded):
        backend = in_parts(loaded, rank, 0.0)
        assert load(tmp_path, backend, rank) == 3
        assert torch.equal(backend.tensors["w"], in_parts(loaded, rank).tensors["w"])
        assert float(backend.tensors["step"]) == 7.0
    whole = Tensors({"w": torch.zeros(5, 3), "step": torch.tensor(0.0)}, {})
    assert load(tmp_path, whole) == 3
    assert torch.equal(whole.tensors["w"], torch.arange(15.0).reshape(5, 3))


def test_a_part_of_another_shape_is_refused_by_the_shape_of_the_whole(tmp_path: Path) -> None:
    save(tmp_path, in_parts(1, 0))
    backend = in_parts(2, 1, 0.0)
    backend.places["w"] = Place((6, 3), (3, 0))
    with pytest.raises(CheckpointBroken, match=r"w is F32 \[5, 3\]; the run's is F32 \[6, 3\]"):
        load(tmp_path, backend)


def test_every_rank_asks_for_the_state_also_one_that_was_not_there(tmp_path: Path) -> None:
    """Ranks that hold parts join them where one asks: if only some asked, they would wait for the others."""

    class Counting(Tensors):
        asked = 0

        def training_state(self) -> TrainingState:
            self.asked += 1
            return super().training_state()

    save(tmp_path)
    counted = [Counting(**vars(some(0.0))) for _ in range(2)]
    for rank, backend in enumerate(counted):
        load(tmp_path, backend, rank)
    assert counted[0].asked == counted[1].asked
