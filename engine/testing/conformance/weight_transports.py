"""What every transport of weights must do, as tests over one sender and two receivers."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import torch

from asyncrl.engine.weights.base import Sent, State, WeightTransport

NAMES = ("one", "two")
Build = Callable[[str], WeightTransport]
"""Builds the transport of the process with this name; `sender` is the trainer's."""


@dataclass(slots=True)
class Line:
    """A sender and receivers that were made alike."""

    sender: WeightTransport
    receivers: Mapping[str, WeightTransport]

    @classmethod
    def of(cls, build: Build) -> "Line":
        return cls(build("sender"), {name: build(name) for name in NAMES})

    async def bring(
        self, sent: Sent, to: Sequence[str] = NAMES, *, again: bool = False
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Make one try, as the publisher does; return what each receiver got."""
        got: dict[str, dict[str, torch.Tensor]] = {}
        offer = await _in_thread(partial(self.sender.offer, sent, to, again=again))

        async def receive(name: str) -> None:
            got[name] = await self.receivers[name].receive(offer)

        async with anyio.create_task_group() as tasks:
            if offer.meets:
                tasks.start_soon(_in_thread, partial(self.sender.serve, offer))
            for name in to:
                tasks.start_soon(receive, name)
        return got

    async def send(self, state: State) -> Sent:
        sent: Sent = await _in_thread(partial(self.sender.send, state))
        return sent


async def _in_thread(call: Callable[[], Any]) -> Any:
    return await anyio.to_thread.run_sync(call)


def weights(version: int) -> dict[str, torch.Tensor]:
    """Return tensors of several types and shapes; 60 of 60,000 numbers differ from one version to the next."""
    large = torch.arange(60_000).reshape(300, 200).to(torch.bfloat16)
    large.view(-1)[version::1000] += 512.0
    return {
        "large": large.t(),  # Not contiguous.
        "float32": torch.linspace(0.0, float(version), 7),
        "scalar": torch.tensor(float(version)),
        "empty": torch.zeros(0, 3),
        "int64": torch.tensor([version, -1]),
        "bool": torch.tensor([version % 2 == 0, True, False]),
    }


def assert_equal(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].cpu(), tensor), name


async def whole_versions_arrive_one_after_the_other(line: Line) -> None:
    """Of every type and shape; the version before may be forgotten once the next is offered."""
    before = None
    for version in range(4):
        sent = await line.send(weights(version))
        got = await line.bring(sent)
        for name in NAMES:
            assert_equal(got[name], weights(version))
        if before is not None:
            line.sender.forget(before)
        before = sent


async def a_step_after_sending_changes_nothing_of_what_was_sent(line: Line) -> None:
    state = weights(1)
    sent = await line.send(state)
    for tensor in state.values():
        tensor.zero_()
    got = await line.bring(sent)
    assert_equal(got["two"], weights(1))


async def two_versions_wait_and_come_in_order(line: Line) -> None:
    """The trainer is a step ahead; what a receiver holds stays, whatever is sent and forgotten afterwards."""
    first, second = await line.send(weights(1)), await line.send(weights(2))
    held = await line.bring(first)
    got = await line.bring(second)
    line.sender.forget(first)
    third = await line.send(weights(3))
    assert_equal(held["one"], weights(1))
    assert_equal(got["one"], weights(2))
    assert_equal((await line.bring(third))["one"], weights(3))


async def a_second_try_reaches_those_that_failed(line: Line) -> None:
    """Then all of them get the version that waited meanwhile."""
    await line.bring(await line.send(weights(0)))
    sent, waiting = await line.send(weights(1)), await line.send(weights(2))
    await line.bring(sent, ["one"])
    got = await line.bring(sent, ["two"], again=True)
    assert_equal(got["two"], weights(1))
    line.sender.forget(sent)
    for state in (await line.bring(waiting)).values():
        assert_equal(state, weights(2))


CONTRACT: tuple[Callable[[Line], Awaitable[None]], ...] = (
    whole_versions_arrive_one_after_the_other,
    a_step_after_sending_changes_nothing_of_what_was_sent,
    two_versions_wait_and_come_in_order,
    a_second_try_reaches_those_that_failed,
)
