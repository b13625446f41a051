"""Several ranks that hold one replica of the model together, as one rank of the plan.

Invariant: all of them get every call that computes, at the same time; the leader alone answers, sends and writes.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import anyio

from asyncrl.engine.aio.outbox import Numbered
from asyncrl.engine.deployment import CopySource, ModelHolder, RankHandle, StateHolder
from asyncrl.engine.model.folder import Note
from asyncrl.engine.records.ending import first_cause
from asyncrl.engine.records.work import ForwardWork, RankResult, TrainWork
from asyncrl.engine.weights.base import Offer, Sent, WeightTransport

Answer = TypeVar("Answer")


class Member(RankHandle, ModelHolder, StateHolder, CopySource, Protocol):
    """A process that trains: a whole replica, or one of the siblings that hold one."""

    async def lend_weights(self) -> None: ...


class Replica:
    """The `members` are siblings; the first leads. The long poll is of each of them, and not of this.

    Members of other replicas are `lenders`, if they hold experts which this one lacks, or shards of its weights.
    """

    def __init__(self, members: Sequence[Member], lenders: Sequence[Member] = ()) -> None:
        self._leader, *self._others = members
        self._lenders = lenders
        self.name = self._leader.name

    async def train(self, work: TrainWork) -> RankResult:
        """Train on all siblings; the leader's figures, with the peak of all their devices (0 if one is not known)."""
        peaks: list[float] = []

        async def train(member: Member) -> RankResult:
            result = await member.train(work)
            peaks.append(result.peak_flops)
            return result

        result = await self._together(train)
        return replace(result, peak_flops=sum(peaks) if all(peaks) else 0.0)

    async def logprobs(self, work: ForwardWork) -> dict[str, tuple[float, float]]:
        return await self._together(lambda one: one.logprobs(work))

    async def warm_up(
        self, examples: Sequence[tuple[list[int], int]], *, steps: int, batch: int, learning_rate: float
    ) -> float:
        def warm_up(one: Member) -> Awaitable[float]:
            return one.warm_up(examples, steps=steps, batch=batch, learning_rate=learning_rate)

        return await self._together(warm_up)

    async def weights(self) -> Sent:
        return await self._gather(lambda leader: leader.weights())

    async def copy_weights(self, transport: WeightTransport) -> Sent:
        return await self._gather(lambda leader: leader.copy_weights(transport))

    async def digest(self) -> Mapping[str, int]:
        # Of all replicas at the same time, so that those which share experts join each others' as well.
        return await self._together(lambda one: one.digest())

    async def sleep(self) -> None:
        await self._together(lambda one: one.sleep())

    async def wake(self) -> None:
        await self._together(lambda one: one.wake())

    async def hold_weights(self) -> int:
        return await self._gather(lambda leader: leader.hold_weights())

    async def save_held(self, folders: Sequence[str], note: Note) -> None:
        await self._leader.save_held(folders, note)

    async def offer(self, sent: Sent, receivers: Sequence[str], *, again: bool = False) -> Offer:
        return await self._leader.offer(sent, receivers, again=again)

    async def serve(self, offer: Offer) -> None:
        await self._leader.serve(offer)

    async def events(self, after_seq: int, wait_s: float) -> list[Numbered]:
        return await self._leader.events(after_seq, wait_s)

    async def _gather(self, lead: Callable[[Member], Awaitable[Answer]]) -> Answer:
        """Have the leader do something with the weights, to which all others give their parts."""

        async def lend(member: Member) -> None:
            await member.lend_weights()

        return await _at_once(lead, self._leader, lend, [*self._others, *self._lenders])

    async def _together(self, call: Callable[[Member], Awaitable[Answer]]) -> Answer:
        """Call all siblings at once; return the leader's answer."""
        return await _at_once(call, self._leader, call, self._others)


async def _at_once(
    lead: Callable[[Member], Awaitable[Answer]],
    leader: Member,
    call: Callable[[Member], Awaitable[Any]],
    others: Sequence[Member],
) -> Answer:
    """Return the leader's answer; the first error of anybody ends the wait for the rest."""
    answers: list[Answer] = []

    async def ask_leader() -> None:
        answers.append(await lead(leader))

    async def ask(member: Member) -> None:
        await call(member)

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask_leader)
            for member in others:
                tasks.start_soon(ask, member)
    except BaseExceptionGroup as group:
        cause = first_cause(group)
        raise cause from cause.__cause__
    return answers[0]
