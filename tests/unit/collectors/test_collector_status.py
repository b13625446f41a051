"""The collector's event loop is never blocked by a task's scoring, in real time."""

import time
from collections.abc import Sequence

import anyio
import pytest

from asyncrl.collectors.collector import Collector, CollectorSettings
from asyncrl.collectors.outcome import Rules
from asyncrl.collectors.scoring import ThreadScorer
from asyncrl.collectors.tasks import Task
from asyncrl.engine.data_plane.base import Partition
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.model.tokenizer import CharTokenizer
from asyncrl.engine.records import Grant, Prompt
from asyncrl.engine.records.columns import COLUMNS
from asyncrl.engine.records.message import PutNotice
from asyncrl.engine.testing.fakes import FakeGenerator
from asyncrl.engine.weights.base import InProcess


class SlowJudge(Task):
    """Scores prompt 0 for two seconds, blocking its thread; others at once."""

    def prompts(self) -> Sequence[Prompt]:
        return [Prompt(0, "0>"), Prompt(1, "1>")]

    def score(self, prompt: Prompt, response: str) -> float:
        if prompt.id == 0:
            time.sleep(1.0)
        return float(response[0])


@pytest.mark.timeout(30)
def test_status_answers_in_under_half_a_second_while_a_reward_blocks_and_other_groups_go_on() -> None:
    """CASE-B18: two samples of group 0 take 2 s together."""

    async def main() -> None:
        plane = LocalPlane()
        await plane.register(Partition("train", 2, COLUMNS, ("trainer",)))
        task = SlowJudge()
        collector = Collector(
            "collector0",
            CollectorSettings("train", 1.0, 4, 20.0, 20.0, 5.0),
            generator=FakeGenerator(seconds=lambda call: 0.0),
            scorer=ThreadScorer(task, Rules("slow")),
            tokenizer=CharTokenizer(),
            plane=plane,
            transport=InProcess(),
        )
        arrived: dict[int, float] = {}
        answers: list[float] = []
        start = time.monotonic()

        async def listen() -> None:
            seen = 0
            while len(arrived) < 2:
                for number, message in await collector.events(seen, 10.0):
                    seen = number
                    if isinstance(message, PutNotice):
                        arrived[message.group.group] = time.monotonic() - start

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collector.run)
            tasks.start_soon(listen)
            await collector.grant([Grant(group, prompt, 2, 0) for group, prompt in enumerate(task.prompts())])
            while len(arrived) < 2:
                asked = time.monotonic()
                await collector.status()
                await anyio.sleep(0.05)
                answers.append(time.monotonic() - asked)
            await collector.stop()
        assert max(answers) < 0.5
        assert len(answers) > 10
        assert arrived[1] < 1.0
        assert arrived[0] > 1.9

    anyio.run(main)
