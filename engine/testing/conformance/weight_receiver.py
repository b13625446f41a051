"""A receiver of weights in a process of its own: what one process sent of a GPU it cannot open itself."""

import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import anyio
import torch

from asyncrl.engine.aio.blocking import in_thread
from asyncrl.engine.errors import AsyncRLError
from asyncrl.engine.lifecycle.transports import Transports
from asyncrl.engine.weights.base import Offer, Sent, State, WeightTransport

_ANSWER_S = 90.0

Got = tuple[dict[str, bytes], set[str]]
"""The bytes of each tensor, and the devices that they lay on."""


class Receiver:
    """A process called `name` with a transport for `device`, which takes one offer after the other."""

    def __init__(self, transports: Transports, name: str, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=_receive, args=(theirs, transports, name, device), daemon=True)
        self._process.start()

    def ask(self, offer: Offer) -> None:
        self._line.send(offer)

    def answer(self) -> Got:
        """Return what came of the offer; the receiver's own error, or TimeoutError."""
        if not self._line.poll(_ANSWER_S):
            raise TimeoutError(f"{self.name} did not answer within {_ANSWER_S:g} s")
        answer = self._line.recv()
        if isinstance(answer, Exception):
            raise answer
        got: Got = answer
        return got

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def bring(sender: WeightTransport, sent: Sent, receivers: Sequence[Receiver], *, again: bool = False) -> list[Got]:
    """Make one try, as the publisher does; return what each receiver got."""
    offer = sender.offer(sent, [receiver.name for receiver in receivers], again=again)
    for receiver in receivers:
        receiver.ask(offer)
    if offer.meets:
        sender.serve(offer)
    return [receiver.answer() for receiver in receivers]


def bytes_of(state: State) -> dict[str, bytes]:
    """Return each tensor's bytes."""
    return {
        name: tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in state.items()
    }


def _receive(line: Connection, transports: Transports, name: str, device: str) -> None:
    transport: Any = transports.build(name, torch.device(device), blocking=in_thread)
    while True:
        try:
            state = anyio.run(transport.receive, line.recv())
            line.send((bytes_of(state), {str(tensor.device) for tensor in state.values()}))
        except AsyncRLError as error:
            line.send(error)
