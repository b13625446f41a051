"""A step that was recorded by `asyncrl train` runs again from its file: the same loss and gradient, bit for bit."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.configs import RunConfig
from asyncrl.engine import metrics
from asyncrl.engine.aio.blocking import in_place
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.events.log import read_events
from asyncrl.engine.events.types import StepEnded
from asyncrl.engine.lifecycle.parts import build_rank, rank_model
from asyncrl.engine.trace.loss_inputs import load
from asyncrl.engine.trace.recording import Recording
from asyncrl.engine.weights.base import InProcess
from asyncrl.trainers.backends.base import Backend, StepSums
from asyncrl.trainers.links import Links

TASK = """
from asyncrl.collectors.tasks.digits import Echo


class Odd(Echo):
    def score(self, prompt, response):
        return float(sum(map(ord, response)) % 2)
"""
"""Rewards that differ within a group whatever the model has learned."""

COMMON = [
    "task.name=odd_task:Odd",
    "trainer.micro_batch_tokens=64",
    "rollout.group_size=8",
    "rollout.groups_per_step=8",
]
OPTIONS = {
    "one rank, one update": ["trainer.ranks=1", "trainer.loss_normalisation=sequence_mean"],
    "all that a step can read": [
        "trainer.updates_per_batch=2",
        "trainer.reference_kl=0.1",
        "trainer.pad_to_step_length=true",
        "trainer.packed=true",
        "trainer.loss_normalisation=constant",
    ],
}


@pytest.fixture
def asyncrl(warm_python: Any, tmp_path: Path) -> Callable[..., str]:
    """Run a command in the test's folder and return what it printed."""

    def run(*words: str) -> str:
        done = warm_python(tmp_path, "-m", "asyncrl", *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return str(done.stdout)

    return run


def backends_at_version_0(config: RunConfig) -> list[Backend]:
    """The run's backends as they were before its first step."""
    torch.set_num_threads(config.trainer.threads)
    plane = LocalPlane(clock=time.monotonic)
    return [
        build_rank(
            config,
            rank,
            model=rank_model(config, rank),
            plane=plane,
            links=Links(),
            transport=InProcess(),
            blocking=in_place,
        )._backend
        for rank in range(config.trainer.ranks)
    ]


def code_of_the_guide() -> dict[str, Any]:
    """What docs/traces.md says to do with a bad step."""
    text = (Path(__file__).parents[2] / "docs" / "traces.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(text.partition("```python\n# bad_step.py\n")[2].partition("```")[0], names)
    return names


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_recorded_step_runs_again_to_the_same_loss_and_gradient(
    tmp_path: Path, asyncrl: Callable[..., str], options: list[str]
) -> None:
    """The second step starts from weights that the first one, run again, has made."""
    (tmp_path / "odd_task.py").write_text(TASK, encoding="utf-8")
    settings = [word for option in (*COMMON, *options) for word in ("--set", option)]
    local = ["--runtime", "local", "--record", "tensors", "--steps", "2"]
    asyncrl("train", *local, *settings, "--run-dir", "out")
    config = Recording.read(tmp_path / "out").config()
    reported = {event.step: event.metrics for event in read_events(tmp_path / "out") if isinstance(event, StepEnded)}
    backends, other, guide = backends_at_version_0(config), backends_at_version_0(config)[0], code_of_the_guide()
    for step in (1, 2):
        said = asyncrl("replay", "out", "--step", str(step), "--out", f"{step}.safetensors")
        inputs = load(tmp_path / f"{step}.safetensors")
        assert f"{inputs.total_tokens} trained tokens" in said
        assert len(inputs.updates) == (2 if "trainer.updates_per_batch=2" in options else 1)
        sums, norms = [StepSums() for _ in backends], []
        for tokens, ranks in inputs.parts():
            for backend, mine, batches in zip(backends, sums, ranks, strict=True):
                for rows in batches:
                    mine.add(backend.accumulate(rows, tokens).read())
            gradients = sum((backend.gradients() for backend in backends[1:]), backends[0].gradients())
            applied = [backend.apply(gradients, learning_rate=config.trainer.learning_rate) for backend in backends]
            norms.append(applied[0])
        figures = reported[step]
        trained = sum(part.tokens for part in sums)
        assert trained == figures[metrics.TOKENS] == inputs.total_tokens
        assert sum(part.loss / len(norms) for part in sums) == figures[metrics.LOSS]
        assert sum(norms) / len(norms) == figures[metrics.GRAD_NORM] > 0
        if len(backends) == 1:
            again = guide["run_again"](inputs, other, config.trainer.learning_rate)
            assert again == figures[metrics.LOSS]
            assert abs(guide["largest_advantage"](tmp_path / f"{step}.safetensors")[0]) > 0
        assert sum(part.reference_kl for part in sums) / trained == figures[metrics.REFERENCE_KL_MEAN]
