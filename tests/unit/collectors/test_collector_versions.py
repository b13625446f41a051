"""The version that a collector serves and stamps: never back, and not that of an update that failed."""

from typing import Any

import anyio
import pytest

from asyncrl.engine.errors import VersionError
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.message import PutNotice, Served
from asyncrl.engine.testing.fakes import FakeGenerator
from asyncrl.engine.weights.base import Offer


def test_a_group_carries_the_version_served_when_it_was_granted(at_desk: Any, grant: Any) -> None:
    """CASE-A2: version 3 at dispatch, 4 loaded while it generates: keys and tag say 3."""
    generator = FakeGenerator(version=3, seconds=lambda _: 10.0)

    async def work(desk: Any) -> GroupMeta:
        desk.collector.set_weight_version(3)
        await desk.collector.grant([grant(0)])
        await anyio.sleep(5)
        await desk.collector.update_weights(4, Offer({}))
        messages = await desk.hear(3)
        assert messages[:2] == [Served(3), Served(4)]
        notice = messages[2]
        assert isinstance(notice, PutNotice)
        return notice.group

    group = at_desk(work, generator=generator)
    assert (group.version, group.keys[0]) == (3, "v3_p0_g0")


def test_the_version_never_goes_back(at_desk: Any) -> None:
    """CASE-A5: 57, then 1, by either way in; nothing reaches the generator."""

    async def work(desk: Any) -> list[int]:
        desk.collector.set_weight_version(57)
        with pytest.raises(VersionError, match=r"57.*1"):
            desk.collector.set_weight_version(1)
        with pytest.raises(VersionError, match=r"57.*1"):
            await desk.collector.update_weights(1, Offer({}))
        assert (await desk.collector.status())["version"] == 57
        return list(desk.generator.updates)

    assert at_desk(work) == []


def test_a_failed_update_leaves_the_version_served(at_desk: Any, grant: Any) -> None:
    """CASE-A6: the hook raises on its second call."""

    def refuse(version: int) -> float:
        if version == 2:
            raise RuntimeError("half a checkpoint")
        return 0.0

    async def work(desk: Any) -> tuple[Any, GroupMeta]:
        await desk.collector.update_weights(1, Offer({}))
        with pytest.raises(RuntimeError, match="half a checkpoint"):
            await desk.collector.update_weights(2, Offer({}))
        await desk.collector.grant([grant(0)])
        served, notice = await desk.hear(2)
        assert isinstance(notice, PutNotice)
        return served, notice.group

    served, group = at_desk(work, generator=FakeGenerator(refuse=refuse))
    assert served == Served(1)
    assert group.version == 1
