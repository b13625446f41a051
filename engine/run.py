"""The entrance: one call checks everything, trains, and returns what the run came to."""

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from asyncrl.configs import Loaded, Override, RunConfig, flatten, load
from asyncrl.configs.load import DEFAULT_PRESET, as_overrides
from asyncrl.engine.errors import ConfigError, TraceError
from asyncrl.engine.events.alarms import Alarms
from asyncrl.engine.events.bias_alarm import BiasAlarm
from asyncrl.engine.events.ledger import Ledger
from asyncrl.engine.events.log import FILE_NAME, EventLog, Fold
from asyncrl.engine.events.progress import Progress
from asyncrl.engine.events.summary import Ends, summarise_log
from asyncrl.engine.events.types import AnyEvent, StepEnded
from asyncrl.engine.records.ending import INTERRUPTED, Ending, failure
from asyncrl.engine.running.checks import check_process, check_with_model, check_without_model, warnings_of
from asyncrl.engine.running.host import Host
from asyncrl.engine.running.logs import log_to
from asyncrl.engine.running.named_model import with_model
from asyncrl.engine.running.outcome import RunFailed, RunInterrupted, Summary
from asyncrl.engine.running.process_state import only_run
from asyncrl.engine.running.redaction import Redaction
from asyncrl.engine.running.resume import Resumption, check_changes, check_same_folder, find, resumed_config
from asyncrl.engine.running.run_files import RunFiles, make_directory, name_of_directory
from asyncrl.engine.running.seal import seal
from asyncrl.engine.running.signals import EndSignals, exit_code
from asyncrl.engine.running.threads import is_main_thread, run_beside_loop
from asyncrl.filters import BaseRolloutFilter
from asyncrl.filters.load import check_objects

if TYPE_CHECKING:
    from asyncrl.engine.running.driver import Order

Config = RunConfig | Loaded | str | PathLike[str] | None


def run(
    config: Config,
    directory: str | PathLike[str],
    overrides: Mapping[str, Any] | None = None,
    *,
    filters: Sequence[BaseRolloutFilter] = (),
    progress: Callable[[StepEnded], Any] | None = None,
    host: Host | None = None,
    resume: bool | Resumption = False,
    allow_code: Sequence[str] = (),
) -> Summary:
    """Train, and return what it came to: `asyncrl train` from Python.

        summary = asyncrl.run("default", "runs/first", {"run.runtime": "local"})

    `config` is a preset's name, a YAML file, a RunConfig, or None for the default; `overrides` are values on top,
    as in `load_config`. The run's files go to `directory`, which is made, and must not hold a run already.
    With `resume` it must hold one: the run goes on from its newest checkpoint, under its own configuration (`config` is
    None) with `overrides` on top; ConfigError for one that would change what is learned, and for code
    (`my_reward.py:score`) that only the folder names, and not `allow_code`.
    `filters` are objects, put into the configured chain before `dynamic_sampling`. Each keeps its state, so give
    every run new ones. `progress` is called at the end of each step with the event that the log has of it.

    It returns when the run has reached its limit. A run that failed raises RunFailed, caused by the first error;
    Ctrl-C finishes the step, settles and raises RunInterrupted, a KeyboardInterrupt; both have the `summary`. What
    cannot work is a ConfigError, or a TypeError for a filter that is none, before anything starts. Nothing is
    printed (the log is in the folder), and nothing is left in the process.

    Under an event loop, as in a notebook, the run has a thread of its own, and this call waits for it. Signals are
    taken in the main thread only. A process can run one at a time: RuntimeError for a second one beside it.
    """
    host = host or Host()
    objects = check_objects(filters)
    found = resume if isinstance(resume, Resumption) else find(Path(fspath(directory))) if resume else None
    if found is None or config is not None:
        loaded = _loaded(config, overrides or {})  # Of a run that is resumed it is compared with its own, below.
    else:
        loaded = resumed_config(found, as_overrides(overrides or {}), objects, allow_code=allow_code)
    if found is not None:
        check_same_folder(found, loaded)
    with only_run():
        check_process(loaded.config)
        task = check_without_model(loaded, objects)
        loaded = with_model(loaded, host.tell)
        task = check_with_model(loaded, task)
        # They import torch, which bad input need not wait for.
        from asyncrl.engine.lifecycle.checks import with_packing
        from asyncrl.engine.running.driver import Order

        loaded = with_packing(loaded, extras=task.task.extras)
        if found is None:
            made = make_directory(Path(fspath(directory)), named=name_of_directory(loaded, Path(fspath(directory))))
            return _attempt(loaded, Order(loaded.config, task, made, objects), host, progress)
        order = Order(loaded.config, task, found.directory, objects, found)
        host.tell(f"goes on from {found.checkpoint or 'its beginning: it has no checkpoint'}")
        for change in check_changes(found, order.recorded_config(), prompts=task.prompt_count):
            host.tell(f"goes on with {change}")
        return _attempt(loaded, order, host, progress)


def _attempt(loaded: Loaded, order: "Order", host: Host, on_step: Callable[[StepEnded], Any] | None) -> Summary:
    """Carry out a run, and go on with it where its processes died, as long as there are attempts."""
    # It imports torch, as the order did.
    from asyncrl.engine.running.attempts import Attempts

    attempts = Attempts(order.config, order.directory)
    states = [chosen.state_dict() for chosen in order.filters]
    while True:
        try:
            return _carry_out(order, host, on_step)
        except RunFailed as failed:
            found, pause_s = attempts.after(failed)
            host.tell(attempts.message(found, pause_s))
            _pause(pause_s, failed)
        # Objects that were used begin as they were; a checkpoint then brings its own state.
        for chosen, state in zip(order.filters, states, strict=True):
            chosen.load_state_dict(state)
        task = check_with_model(loaded, check_without_model(loaded, order.filters))
        order = replace(order, task=task, resumption=found)


def _pause(seconds: float, failed: RunFailed) -> None:
    """Wait before the next attempt; RunInterrupted by the first signal, and the run can be resumed by hand."""
    asked: list[signal.Signals] = []
    over = threading.Event()

    def end(number: signal.Signals) -> None:
        asked.append(number)
        over.set()

    with EndSignals(end) if is_main_thread() else nullcontext():
        over.wait(seconds)
    if asked:
        code, summary = exit_code(asked[0]), failed.summary
        ended = replace(summary, exit_code=code, exit_reason=f"{INTERRUPTED} before the next attempt; {failed}")
        raise RunInterrupted(ended.exit_reason, ended) from failed


def _loaded(config: Config, overrides: Mapping[str, Any]) -> Loaded:
    given = as_overrides(overrides)
    if isinstance(config, Loaded) and not given:
        return config
    if isinstance(config, Loaded):
        known = [Override(path, value, config.sources[path]) for path, value in flatten(config.config).items()]
        return load(DEFAULT_PRESET, [*known, *given])
    if isinstance(config, RunConfig):
        known = [Override(path, value, "the RunConfig given") for path, value in flatten(config).items()]
        return load(DEFAULT_PRESET, [*known, *given])
    return load(DEFAULT_PRESET if config is None else fspath(config), given, option="config")


def _carry_out(order: "Order", host: Host, on_step: Callable[[StepEnded], Any] | None) -> Summary:
    """Run what was checked, write its files, and say how it came out."""
    from asyncrl.engine.running.driver import Driver

    rollout, directory = order.config.rollout, order.directory

    def warn(message: str, **figures: Any) -> None:
        # The logger is looked up at each warning: where logs go is settled below.
        if driver.speaks:
            structlog.get_logger().warning(message, **figures)

    ledger, progress, ends = Ledger(), Progress(order.config.run.reward_window, Alarms(warn=warn)), Ends()
    driver = Driver(order, ledger, progress, host)
    unsealed = seal(directory, order.recorded_config())
    redact = Redaction(os.environ)
    files = RunFiles(directory, driver.end, redact=redact)
    host.begin(order.config, directory, ledger=ledger, progress=progress)
    with ExitStack() as outer:
        take_signals: Callable[[], None] = _no_signals
        if is_main_thread():
            take_signals = outer.enter_context(EndSignals(driver.interrupt, kill=driver.kill)).install
        with ExitStack() as stack:
            try:
                stack.enter_context(
                    log_to(directory / "log.jsonl", lost=files.lose, complain=host.complain, redact=redact)
                )
                alarm = BiasAlarm(progress.length_bias, below=rollout.bias_warning, warn=warn)
                folds: list[Fold] = [ledger, progress, ends, alarm]
                if on_step is not None:
                    folds.append(_Steps(lambda event: driver.speaks and on_step(event), driver.end))
                path = directory / FILE_NAME
                events = EventLog(
                    clock=time.monotonic,
                    wall=time.time,
                    folds=folds,
                    path=path,
                    threaded=True,
                    on_failure=files.lose,
                    redact=redact,
                )
            except (TraceError, OSError) as error:
                # Another process began a run in this folder at the same moment; or nothing can be written there.
                raise ConfigError(str(error)) from error
            stack.callback(events.close)
            for line in filter(None, [*warnings_of(order.config), *order.task.warnings, unsealed]):
                structlog.get_logger().warning(line)
                host.tell(f"warning: {line}")
            ending = run_beside_loop(lambda call_in: driver.run(events, take_signals, call_in))
        content = summarise_log(ledger, progress, ends, bias_warning=rollout.bias_warning)
        ending = files.finish(ending, content, driver.filter_state)
    return _told(ending, Summary.of(content, directory), files)


def _told(ending: Ending, summary: Summary, files: RunFiles) -> Summary:
    if ending.code == 0:
        return summary
    if ending.code != 1:
        raise RunInterrupted(f"{ending.reason}; what was done is in {summary.directory}", summary)
    where = f"see {summary.directory / 'log.jsonl'} and {summary.directory / FILE_NAME}"
    raise RunFailed(f"{ending.reason} ({where})", summary, files.lost) from ending.error


def _no_signals() -> None:
    """Take no signals, where this is not the main thread."""


class _Steps:
    """A fold that calls a user's function at the end of each step; what it raises ends the run in order."""

    kinds = (StepEnded,)

    def __init__(self, call: Callable[[StepEnded], Any], end: Callable[[Ending], None]) -> None:
        self._call = call
        self._end = end

    def apply(self, event: AnyEvent) -> None:
        assert isinstance(event, StepEnded)
        try:
            self._call(event)
        except Exception as error:  # The edge of user code.
            self._end(failure(error))
