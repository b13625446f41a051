"""After which failures a command goes on by itself, and from where."""

from pathlib import Path
from typing import Any

import pytest

from asyncrl.engine.errors import ActorDied, DataPlaneDown, EngineDied, FilterError, GenerationError, Overdue
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.types import SCHEMA, RunEnded, RunStarted
from asyncrl.engine.running.attempts import Attempts
from asyncrl.engine.running.outcome import RunFailed, Summary
from asyncrl.engine.testing.simulation import simulated_config


class RayTaskError(Exception):
    """As Ray's: it carries what an actor raised as `cause`."""

    def __init__(self, cause: Exception) -> None:
        super().__init__("a traceback")
        self.cause = cause


def failed(cause: Exception, steps: int = 0) -> RunFailed:
    content: dict[str, Any] = dict.fromkeys(Summary.__dataclass_fields__)
    error = RunFailed(f"it failed: {cause}", Summary(**{**content, "steps": steps}))
    error.__cause__ = cause
    return error


def attempts(folder: Path, **settings: Any) -> Attempts:
    log = EventLog(clock=lambda: 0.0, wall=lambda: 0.0, path=folder / "events.jsonl")
    log.append(RunStarted(schema=SCHEMA, config={}, software={}))
    log.append(RunEnded(code=1, reason="it failed"))
    log.close()
    given = {"run__runtime": "ray", **{f"supervision__{name}": value for name, value in settings.items()}}
    return Attempts(simulated_config(**given), folder, now=lambda: 0.0)


@pytest.mark.parametrize(
    "cause",
    [
        ActorDied("rank1 died", actor="rank1"),
        DataPlaneDown("a process of TransferQueue died"),
        Overdue("no group to judge for 300 s"),
        RayTaskError(EngineDied("vLLM's engine process died")),
        RayTaskError(ExceptionGroup("of a collector", [DataPlaneDown("gone")])),
    ],
)
def test_a_death_is_gone_on_with_from_the_beginning_if_nothing_was_trained(cause: Exception, tmp_path: Path) -> None:
    tried = attempts(tmp_path, run_restarts=2)
    found, pause_s = tried.after(failed(cause))
    assert (found.after, found.saved, found.attempt, pause_s) == (1, None, 2, 1.0)
    said = tried.message(found, pause_s)
    assert said.startswith("attempt 1 of 3 failed: ")
    assert said.endswith("attempt 2 goes on from step 0 (the beginning: no step was trained) in 1 s")


@pytest.mark.parametrize(
    "cause",
    [
        FilterError("filter Mine raised"),
        GenerationError("8 groups in a row failed"),
        RayTaskError(FloatingPointError("the gradient is nan")),
        RayTaskError(RuntimeError("CUDA error")),
        ValueError("a bug"),
    ],
)
def test_an_error_of_living_code_ends_the_command(cause: Exception, tmp_path: Path) -> None:
    error = failed(cause)
    with pytest.raises(RunFailed) as raised:
        attempts(tmp_path).after(error)
    assert raised.value is error


def test_the_same_failure_at_the_same_step_twice_ends_the_command(tmp_path: Path) -> None:
    """Process numbers differ; the actor is the same."""
    tried = attempts(tmp_path, run_restarts=9)
    tried.after(failed(ActorDied("rank1 died: pid 4711", actor="rank1")))
    tried.after(failed(DataPlaneDown("gone")))
    tried.after(failed(ActorDied("rank1 died: pid 1", actor="rank1")))
    with pytest.raises(
        RunFailed, match=r"it failed so twice after step 0.*asyncrl train --resume .* goes on"
    ) as raised:
        tried.after(failed(ActorDied("rank1 died: pid 2", actor="rank1")))
    assert isinstance(raised.value.__cause__, ActorDied)


def test_the_budget_ends(tmp_path: Path) -> None:
    tried = attempts(tmp_path, run_restarts=1)
    tried.after(failed(DataPlaneDown("gone")))
    with pytest.raises(RunFailed, match=r"1 attempts followed within 3600 s \(supervision.run_restarts\)"):
        tried.after(failed(Overdue("nothing came")))


def test_steps_without_a_checkpoint_are_not_thrown_away_unasked(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"7 steps were trained, and there is no checkpoint yet.*begins anew"):
        attempts(tmp_path).after(failed(DataPlaneDown("gone"), steps=7))


@pytest.mark.parametrize("settings", [{"run_restarts": 0}, {"runtime": "local"}])
def test_without_restarts_or_processes_the_first_failure_is_the_end(settings: dict[str, Any], tmp_path: Path) -> None:
    tried = attempts(tmp_path, **({} if "runtime" in settings else settings))
    if "runtime" in settings:
        tried = Attempts(simulated_config(run__runtime="local"), tmp_path)
    with pytest.raises(RunFailed):
        tried.after(failed(DataPlaneDown("gone")))
