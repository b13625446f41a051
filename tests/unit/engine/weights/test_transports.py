"""Transports of weights that need no Ray and no GPU: one contract for all, and what is each one's own."""

import resource
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest
import torch

from asyncrl.engine.aio.blocking import in_thread
from asyncrl.engine.errors import Overdue, VersionError
from asyncrl.engine.testing.conformance.weight_transports import CONTRACT, Build, Line, assert_equal, weights
from asyncrl.engine.weights.base import InProcess, Offer, WeightTransport
from asyncrl.engine.weights.broadcast import Broadcast
from asyncrl.engine.weights.changes import apply_changes, find_changes
from asyncrl.engine.weights.delta import Delta
from asyncrl.engine.weights.folder import Folder
from asyncrl.engine.weights.shared_file import SharedFile
from asyncrl.engine.weights.snapshots import Snapshots
from asyncrl.trainers.reducer import MeetingPoint

KINDS = ("in_process", "shared_file", "folder", "gloo")
CPU = torch.device("cpu")
TIMEOUT_S = 20.0


@pytest.fixture
def build(tmp_path: Path) -> Callable[[str], Build]:
    """Builders by kind; `delta-KIND` is a delta over it."""
    meeting = MeetingPoint()

    def of(kind: str, timeout_s: float = TIMEOUT_S) -> Build:
        def plain(name: str) -> WeightTransport:
            match kind.removeprefix("delta-"):
                case "in_process":
                    return InProcess()
                case "shared_file":
                    return SharedFile(tmp_path)
                case "folder":
                    return Folder(tmp_path, blocking=in_thread)
            return Broadcast(name, meeting.address, backend="gloo", device=CPU, timeout_s=timeout_s, blocking=in_thread)

        if kind.startswith("delta-"):
            return lambda name: Delta(plain(name), blocking=in_thread)
        return plain

    return of


@pytest.mark.parametrize("test", CONTRACT, ids=lambda test: test.__name__)
@pytest.mark.parametrize("kind", [*KINDS, *(f"delta-{kind}" for kind in KINDS)])
def test_the_contract_holds(kind: str, test: Callable[[Line], Awaitable[None]], build: Callable[[str], Build]) -> None:
    async def main() -> None:
        with anyio.fail_after(TIMEOUT_S):
            await test(Line.of(build(kind)))

    anyio.run(main)


@pytest.mark.parametrize("kind", ["shared_file", "folder", "delta-shared_file"])
def test_files_of_forgotten_versions_are_gone(kind: str, tmp_path: Path, build: Callable[[str], Build]) -> None:
    """Also of a version that was sent twice."""

    async def main() -> None:
        line = Line.of(build(kind))
        for version in range(3):
            sent = await line.send(weights(version))
            await line.bring(sent)
            await line.bring(sent, again=True)
            line.sender.forget(sent)
            assert list(tmp_path.iterdir()) == []

    anyio.run(main)


def test_a_receiver_that_does_not_come_fails_the_try_alone(build: Callable[..., Build]) -> None:
    """Nobody hangs, nobody is served half of it, and the next try reaches all."""

    async def main() -> None:
        line = Line.of(build("gloo", timeout_s=0.5))
        await line.bring(await line.send(weights(0)))
        sent = await line.send(weights(1))
        # A new group: `two` left the old one.
        offer = line.sender.offer(sent, ["one", "two"], again=True)
        failed = []

        async def fails(call: Callable[[], Awaitable[object]]) -> None:
            with pytest.raises(Overdue, match=r"did not finish a broadcast of .* to one, two within 0\.5 s"):
                await call()
            failed.append(call)

        with anyio.fail_after(10.0):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(fails, lambda: in_thread(lambda: line.sender.serve(offer)))
                tasks.start_soon(fails, lambda: line.receivers["one"].receive(offer))
            assert len(failed) == 2
            for state in (await line.bring(sent, again=True)).values():
                assert_equal(state, weights(1))

    anyio.run(main)


def test_a_receiver_that_leaves_a_group_in_use_fails_the_try_alone(build: Callable[..., Build]) -> None:
    """The group is that of the last version, so that its members need not meet first."""

    async def main() -> None:
        line = Line.of(build("gloo", timeout_s=0.5))
        await line.bring(await line.send(weights(0)))
        sent = await line.send(weights(1))
        with anyio.fail_after(10.0):
            offer = line.sender.offer(sent, ["one", "two"])
            with pytest.raises(Overdue):
                await line.receivers["one"].receive(offer)
            for state in (await line.bring(sent, again=True)).values():
                assert_equal(state, weights(1))

    anyio.run(main)


def test_changes_give_the_version_that_they_were_found_in() -> None:
    """Over several pages, with the first and the last word of a page among them."""
    base = torch.randint(0, 256, (5 * 2**17 + 64,), dtype=torch.uint8)
    flat = base.clone()
    at = torch.tensor([0, 1, 2**17 - 1, 2**17, 2**17 + 9, 4 * 2**17 - 1, base.numel() - 1])
    flat[at] += 1
    changes = find_changes(base, flat)
    assert changes is not None
    assert changes["words"].numel() == 6  # Bytes 0 and 1 are one word.
    assert torch.equal(apply_changes(base, changes), flat)
    assert find_changes(base, base + 1) is None


def test_a_delta_is_as_large_as_what_changed(build: Callable[[str], Build]) -> None:
    async def main() -> None:
        line = Line.of(build("delta-in_process"))
        first, second = await line.send(weights(0)), await line.send(weights(1))
        assert first.bytes > 120_000
        assert second.bytes < 1_000

    anyio.run(main)


def test_a_receiver_without_the_base_asks_for_the_whole(build: Callable[[str], Build]) -> None:
    async def main() -> None:
        line = Line.of(build("delta-in_process"))
        await line.bring(await line.send(weights(0)), ["one"])
        sent = await line.send(weights(1))
        with pytest.raises(ExceptionGroup) as caught:
            await line.bring(sent, ["two"])
        assert isinstance(caught.value.exceptions[0], VersionError)
        assert "changes of weights number 0 came, and none is here" in str(caught.value.exceptions[0])
        assert_equal((await line.bring(sent, ["two"], again=True))["two"], weights(1))

    anyio.run(main)


def test_weights_for_which_there_is_no_room_are_refused_and_nothing_of_them_stays(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(VersionError, match=r"\d+ bytes of weights could not be written to .*; make room there"):
            SharedFile(tmp_path).send(weights(0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["shared_file", "folder"])
def test_a_file_that_is_not_on_this_host_is_a_clear_error(
    kind: str, tmp_path: Path, build: Callable[[str], Build]
) -> None:
    async def main() -> None:
        line = Line.of(build(kind))
        sent = await line.send(weights(0))
        for file in tmp_path.iterdir():
            file.unlink()
        with pytest.raises(VersionError, match="cannot be read"):
            await line.receivers["one"].receive(Offer(sent.content))

    anyio.run(main)


def test_buffers_of_forgotten_versions_are_used_again_whatever_their_size() -> None:
    """Changes are of another size each time; a new buffer each time would fill a GPU."""
    snapshots = Snapshots()
    buffers = {}
    for number in range(40):
        state = {"words": torch.full((1000 + 7 * number % 200,), number, dtype=torch.int32)}
        taken = snapshots.take(state)
        buffers[taken.buffer.memory.data_ptr()] = taken.buffer
        if number:
            # The version before is still whole while this one was taken.
            before = snapshots.get(number - 1)
            assert bool((before.layout.views(before.flat)["words"] == number - 1).all())
            snapshots.forget(number - 1)
    assert len(buffers) <= 5
    with pytest.raises(VersionError, match=r"number 3 were forgotten; kept are \[39\]"):
        snapshots.get(3)
