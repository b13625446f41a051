"""A collector that does what a script says, against a data plane and the real register of groups."""

from collections.abc import Sequence
from itertools import count

import anyio
import torch

from asyncrl.engine.data_plane.base import DataPlane
from asyncrl.engine.deployment import PARTITION
from asyncrl.engine.events.types import Acknowledged
from asyncrl.engine.records import Grant, GroupMeta, Prompt
from asyncrl.engine.records.columns import LOGPROBS, TOKENS
from asyncrl.engine.testing.script import EndOfData, Entry, FailGroup, HangGroup, PutGroup, SetVersion
from asyncrl.engine.trace.machinery import Machinery
from asyncrl.filters.testing import make_group

COLLECTOR = "collector0"


class ScriptedCollector:
    """Plays a script into a data plane and a register of groups, as a collector's messages would."""

    def __init__(self, script: Sequence[Entry], *, plane: DataPlane, machinery: Machinery, group_size: int) -> None:
        self._script = script
        self._plane = plane
        self._machinery = machinery
        self._group_size = group_size
        self._numbers = count()
        self.finished = False
        self.training = False

    async def run(self) -> None:
        """Do all entries in order; then the data is at its end."""
        for entry in self._script:
            await anyio.sleep(entry.seconds)
            await self._do(entry)
        self._finish()

    async def _do(self, entry: Entry) -> None:
        groups = self._machinery.groups
        match entry:
            case PutGroup():
                number = self._dispatch(entry.prompt)
                group = self._group(entry, number)
                await self._plane.put(PARTITION, group, _columns(group))
                groups.arrive(group, seconds=entry.seconds)
            case HangGroup():
                self._dispatch(None)
            case FailGroup():
                groups.fail(self._dispatch(None), entry.reason, entry.error)
            case SetVersion():
                # A step that runs ends at its own version first.
                await groups.changed.wait_until(lambda: not self.training)
                self._machinery.set_version(entry.version)
                acknowledge(self._machinery)
            case EndOfData():
                self._finish()

    def _finish(self) -> None:
        self.finished = True
        self._machinery.groups.changed.notify()

    def _dispatch(self, prompt: int | None) -> int:
        number = next(self._numbers)
        grant = Grant(number, Prompt(number if prompt is None else prompt, ""), self._group_size, 0)
        self._machinery.groups.dispatch(grant, COLLECTOR, served=self._machinery.versions.served[COLLECTOR])
        return number

    def _group(self, entry: PutGroup, number: int) -> GroupMeta:
        served = self._machinery.versions.served[COLLECTOR]
        tags = {"prompt": number if entry.prompt is None else entry.prompt, **entry.tags}
        return make_group(
            entry.rewards, group=number, version=served if entry.version is None else entry.version, **tags
        )


def acknowledge(machinery: Machinery) -> None:
    """Let the collector serve the trainer's version."""
    newest = machinery.versions.trainer
    if machinery.versions.served[COLLECTOR] < newest:
        machinery.versions.acknowledge(COLLECTOR, newest)
        machinery.log.append(Acknowledged(generator=COLLECTOR, version=newest))


def _columns(group: GroupMeta) -> dict[str, list[torch.Tensor]]:
    prompt = group.prompt_tokens
    return {
        TOKENS: [torch.zeros(prompt + length, dtype=torch.int32) for length in group.response_tokens],
        LOGPROBS: [torch.zeros(length, dtype=torch.float32) for length in group.response_tokens],
    }
