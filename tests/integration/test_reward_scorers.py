"""Reward functions of a run on Ray: in a process of their own, or in the loop if they are async; time limits hold."""

import os
from pathlib import Path

import anyio
import pytest

from asyncrl.collectors.outcome import Outcome, SampleFailure
from asyncrl.collectors.tasks import Response, Reward
from asyncrl.configs import load_config
from asyncrl.engine.lifecycle.scorers import ray_scorer
from asyncrl.engine.records import Prompt

MINE = """
import os, time

def there(prompt, response):
    if response == "hang":
        time.sleep(60)
    return os.getpid()

async def here(prompt, response):
    return os.getpid() + response.tokens

def rank(prompt, responses, rewards):
    if "slow group" in responses:
        time.sleep(60)
    return [0 if reward is None else prompt.fields["level"] for reward in rewards]
"""


def test_each_function_runs_where_it_belongs_and_what_hangs_fails_what_it_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names = ("there", "here", "rank")
    functions = [{"name": f"mine.py:{name}"} for name in names]
    scorer = ray_scorer(
        load_config("default", {"reward.functions": functions, "collector.score_timeout_s": 0.5}), taggers={}
    )

    async def scored(*responses: str) -> list[Outcome]:
        given = [Response(text, tokens=5, finished=True) for text in responses]
        return await scorer.score(Prompt(0, "0>", fields={"level": 3}), given)

    async def main() -> tuple[list[Outcome], list[Outcome]]:
        await scored("a")  # The process is ready.
        return await scored("a", "hang", "b"), await scored("a", "slow group")

    try:
        (first, hung, last), group = anyio.run(main)
    finally:
        scorer.close()
    assert isinstance(first, Reward)
    assert isinstance(last, Reward)
    assert (first.parts["here"], first.parts["rank"]) == (os.getpid() + 5, 3)
    assert first.parts["there"] not in (os.getpid(), last.parts["there"])
    assert isinstance(hung, SampleFailure)
    assert hung.error.startswith("rewards mine.py:there, mine.py:here, mine.py:rank: score took longer than 0.5 s")
    assert [outcome.cause for outcome in group if isinstance(outcome, SampleFailure)] == ["score_timeout"] * 2
