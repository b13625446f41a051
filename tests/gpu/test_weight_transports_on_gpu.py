"""Weights between GPU processes: out of a buffer on the sender's GPU, and broadcast between GPUs."""

import time

import pytest
import torch

from asyncrl.engine.aio.blocking import in_thread
from asyncrl.engine.errors import Overdue
from asyncrl.engine.lifecycle.transports import Transports, Way
from asyncrl.engine.testing.conformance.weight_receiver import Receiver, bring, bytes_of
from asyncrl.engine.testing.conformance.weight_transports import assert_equal, weights
from asyncrl.engine.weights.base import Sent, State
from asyncrl.engine.weights.cuda_ipc import CudaIPC
from asyncrl.trainers.reducer import MeetingPoint

FIRST = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def on_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL meets on loopback, as in the actors of a run."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")


def on_gpu(state: State) -> dict[str, torch.Tensor]:
    return {name: tensor.to(FIRST) for name, tensor in state.items()}


def publish_versions(way: Way, gpus: list[int], *, delta: bool = False) -> None:
    """Send four versions from the first GPU; the trainer steps on at once, and is one version ahead."""
    meeting = MeetingPoint()
    transports = Transports(way, delta, None, meeting.address, 60.0)
    sender = transports.build("sender", FIRST, blocking=in_thread)
    receivers = [Receiver(transports, f"r{i}", f"cuda:{gpu}") for i, gpu in enumerate(gpus)]
    try:
        waiting: list[Sent] = []
        for version in range(4):
            state = on_gpu(weights(version))
            waiting.append(sender.send(state))
            for tensor in state.values():
                tensor.zero_()
            if version:
                sent = waiting.pop(0)
                for gpu, (found, places) in zip(gpus, bring(sender, sent, receivers), strict=True):
                    assert places == {f"cuda:{gpu}"}
                    assert found == bytes_of(weights(version - 1))
                sender.forget(sent)
    finally:
        for receiver in receivers:
            receiver.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("delta", [False, True])
def test_receivers_copy_out_of_a_buffer_on_the_same_gpu(delta: bool) -> None:
    publish_versions("cuda_ipc", [0, 0], delta=delta)


@pytest.mark.gpus(2)
@pytest.mark.timeout(300)
def test_a_receiver_on_another_gpu_copies_out_of_the_senders_memory() -> None:
    publish_versions("cuda_ipc", [1, 0])


@pytest.mark.gpus(2)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("delta", [False, True])
def test_a_broadcast_by_nccl_reaches_the_other_gpu(delta: bool) -> None:
    publish_versions("nccl", [1], delta=delta)


@pytest.mark.gpus(2)
@pytest.mark.timeout(300)
def test_a_broadcast_by_nccl_with_one_side_alone_ends_and_the_next_try_works() -> None:
    """The receiver does not join the group; then the sender sends nothing in it. A small broadcast to a receiver that
    does nothing may end well for the sender: it fits into buffers.
    """
    meeting = MeetingPoint()
    transports = Transports("nccl", False, None, meeting.address, 20.0)
    sender = transports.build("sender", FIRST, blocking=in_thread)
    receiver = Receiver(transports, "r0", "cuda:1")
    try:
        for version, alone in enumerate(("sender", "receiver")):
            sent = sender.send(on_gpu(weights(version)))
            offer = sender.offer(sent, ["r0"])
            if alone == "receiver":
                receiver.ask(offer)
            started = time.monotonic()
            with pytest.raises(Overdue, match="did not finish a broadcast"):
                sender.serve(offer) if alone == "sender" else receiver.answer()
            assert time.monotonic() - started < 60.0
            [(found, _)] = bring(sender, sent, [receiver], again=True)
            assert found == bytes_of(weights(version))
    finally:
        receiver.close()


def test_a_sender_on_the_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="cuda_ipc carries weights that lie on a GPU"):
        CudaIPC(torch.device("cpu"), blocking=in_thread).send(weights(0))


def test_snapshots_of_a_gpu_are_whole_and_their_buffers_come_again() -> None:
    transport = CudaIPC(FIRST, blocking=in_thread)
    addresses = set()
    for version in range(6):
        sent = transport.send(on_gpu(weights(version)))
        taken = transport._snapshots.get(sent.number)
        addresses.add(taken.buffer.memory.data_ptr())
        assert_equal(taken.layout.views(taken.flat), weights(version))
        transport.forget(sent)
    assert len(addresses) == 1
