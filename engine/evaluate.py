"""How good a model is: a run's, or any Hugging Face folder, on prompts that it was not trained on."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import anyio

from asyncrl.collectors.tasks.prepared import PreparedTask
from asyncrl.configs import Loaded, Override, RunConfig, flatten, load
from asyncrl.configs.load import DEFAULT_PRESET, as_overrides
from asyncrl.configs.named_code import check_code, code_of
from asyncrl.engine.aio.call_in import CallIn
from asyncrl.engine.errors import ConfigError, TraceError
from asyncrl.engine.events.log import EventLog, effective_events
from asyncrl.engine.events.types import EvaluationEnded
from asyncrl.engine.generate import find_model
from asyncrl.engine.model import smollm2
from asyncrl.engine.model.folder import Note
from asyncrl.engine.model.hub import is_on_hub
from asyncrl.engine.records.ending import first_cause
from asyncrl.engine.records.scores import Scores
from asyncrl.engine.running.checks import check_devices
from asyncrl.engine.running.named_model import with_model
from asyncrl.engine.running.process_state import only_run, torch_threads_restored
from asyncrl.engine.running.seal import sealed_code
from asyncrl.engine.running.sources import prepare_sources, with_evaluation
from asyncrl.engine.running.threads import run_beside_loop
from asyncrl.engine.trace.recording import Recording


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What the evaluation of a model came to: `scores` over all prompts, `datasets` by data set.

    `version` is of a model that a run saved, None for any other.
    """

    model: Path
    version: int | None
    samples: int
    temperature: float
    pass_reward: float
    seconds: float
    scores: Scores
    datasets: Mapping[str, Scores]

    def to_dict(self) -> dict[str, Any]:
        """Return what `asyncrl eval --json` prints."""
        return {**asdict(self), "model": str(self.model)}


def evaluate(
    model: str | PathLike[str],
    overrides: Mapping[str, Any] | None = None,
    *,
    config: Loaded | str | PathLike[str] | None = None,
    best: bool = False,
    allow_code: Sequence[str] = (),
) -> Evaluation:
    """Have a model answer the evaluation prompts, and return how good it is: `asyncrl eval` from Python.

        asyncrl.evaluate("runs/first", {"evaluation.path": "test.jsonl"}).scores.pass_at["1"]

    `model` is a run's folder, whose last model is evaluated, or with `best` its `model-best`; any Hugging Face folder;
    or `smollm2`. Without `config` a run's own configuration holds, and the default one for any other model. Prompts are
    those of the configuration's section `evaluation`, scored as in training. It takes no actors: all is in this
    process. ConfigError for what cannot work, and for code (`my_reward.py:score`) that only the run's folder names, and
    not `allow_code`; GenerationError if no sample could be scored.
    """
    if isinstance(config, Loaded):
        loaded = config
    elif config is not None:
        loaded = load(fspath(config), as_overrides(overrides or {}))
    else:
        loaded = recorded_config(model, as_overrides(overrides or {}), allow_code=allow_code)
    loaded = _for(loaded, model, best=best)
    folder = Path(loaded.config.model.path or "")
    with only_run(), torch_threads_restored():
        before = Note.read(folder)
        prepared = _prepare(loaded)
        ended = _answered(loaded.config, prepared)
        if Note.read(folder) != before:
            raise ConfigError(f"{str(folder)!r} was replaced by a newer model while it was evaluated; do it again")
    asked = loaded.config.evaluation
    return Evaluation(
        model=folder,
        version=None if before is None else before.version,
        samples=asked.samples,
        temperature=asked.temperature,
        pass_reward=asked.pass_reward,
        seconds=ended.seconds,
        scores=ended.scores,
        datasets=ended.datasets,
    )


def recorded_config(
    model: str | PathLike[str],
    overrides: Sequence[Override],
    *,
    rewards: Sequence[str] = (),
    allow_code: Sequence[str] = (),
) -> Loaded:
    """Return the configuration of the run that has this folder, the default one for a folder that is not a run's.

    `overrides` are on top, and `rewards` appended. ConfigError if it names code that the user does not, here or in
    `allow_code`: the folder may be another's.
    """
    run = f"the run {fspath(model)}"
    try:
        started = next(effective_events(Path(fspath(model))), None)
    except (OSError, TraceError):
        started = None
    recorded = [] if started is None else Recording([started]).values(run)
    loaded = load(DEFAULT_PRESET, [*recorded, *overrides], rewards=rewards)
    used = {path: value for path, value in flatten(loaded.config).items() if path != "filters"}
    allowed = [*allow_code, *rewards, *code_of(overrides), *sealed_code(Path(fspath(model)))]
    check_code(used, recorded, allowed=allowed, source=run)
    return loaded


def _for(loaded: Loaded, model: str | PathLike[str], *, best: bool) -> Loaded:
    """Return the configuration with this model, and without what only training uses."""
    given = fspath(model)
    named = given if smollm2.is_named(given) or is_on_hub(given) else str(find_model(given, best=best))
    config = loaded.config
    changed = {
        "filters": [],
        "model": config.model.model_copy(
            update={"path": named, "revision": config.model.revision if is_on_hub(given) else None}
        ),
        "trainer": config.trainer.model_copy(update={"sft_warm_up_steps": 0}),
        "run": config.run.model_copy(update={"runtime": "local"}),
    }
    sources = {**loaded.sources, "model.path": "the model given"}
    return with_model(Loaded(config.model_copy(update=changed), sources), lambda line: None)


def _prepare(loaded: Loaded) -> PreparedTask:
    """Check prompts, rewards and model. ConfigError if they do not go together."""
    from asyncrl.engine.lifecycle.checks import check_evaluation

    check_devices(loaded, "evaluation")
    prepared = with_evaluation(loaded.config, prepare_sources(loaded, (), only_evaluates=True))
    check_evaluation(loaded.config, prepared.evaluation)
    return prepared


def _answered(config: RunConfig, prepared: PreparedTask) -> EvaluationEnded:
    try:
        return run_beside_loop(lambda call_in: anyio.run(partial(_examine, config, prepared, call_in)))
    except ExceptionGroup as group:
        raise first_cause(group) from group


async def _examine(config: RunConfig, prepared: PreparedTask, call_in: CallIn) -> EvaluationEnded:
    from asyncrl.engine.data_plane.local import LocalPlane
    from asyncrl.engine.lifecycle.local import local_evaluator
    from asyncrl.engine.loop.examiner import Examiner, ExaminerSettings

    plane = LocalPlane()
    collector = await local_evaluator(config, prepared, plane=plane, call_in=call_in)
    examiner = Examiner(
        ExaminerSettings.of(config),
        collector,
        prepared.evaluation,
        plane=plane,
        events=EventLog(clock=time.monotonic, wall=time.time),
        clock=time.monotonic,
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(examiner.run)
        ended = await examiner.examine(0, None)
        tasks.cancel_scope.cancel()
    return ended
