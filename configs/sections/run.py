"""The run itself, and how long its parts may be silent."""

from typing import Annotated, Literal

from pydantic import Field

from asyncrl.configs.sections.fields import Count, Place, Seconds, Section


class Run(Section):
    seed: Annotated[int, Field(ge=0, lt=2**32)]
    """Seed of all randomness: weights, prompt order, sampling."""
    runtime: Literal["ray", "local"]
    """`ray`: with Ray actors and TransferQueue; `local`: the same loop in one process."""
    steps: Count | None
    """End after this many training steps; null: no such limit."""
    batches: Count | None
    """End after this many batches were judged, including those without a survivor; null: no such limit."""
    stop_at_reward: float | None
    """End when the mean reward of the last `reward_window` judged batches reaches this; null: never."""
    reward_window: Count
    """Number of batches over which `stop_at_reward` averages."""
    alarm_window: Count
    """Number of batches over which alarms take the share of samples lost to each cause."""
    max_empty_batches: Count | None
    """End with exit code 1 after this many batches in a row that had nothing to train, and name the cause; null:
    never."""
    directory: Place | None
    """Where event log, logs and summary go; null: a new folder under `runs/`."""
    record: Literal["events", "tensors"]
    """`events`: record the event log; `tensors`: also the rows of each step, from which `asyncrl replay --step`
    rebuilds its loss inputs."""
    save_model: bool
    """Save the last weights as a Hugging Face folder, `model/` in the run's folder, when the run ends, however it
    ends."""
    save_every: Count | None
    """Save `model/` after every so many training steps too; null: only at the end."""
    save_best: bool
    """With `save_every`, keep in `model-best/` the saved version with the highest mean reward of the last
    `reward_window` judged batches."""
    save_timeout_s: Seconds
    """A save that takes longer is given up, with a warning; the last one of a run fails the run."""


class Supervision(Section):
    start_timeout_s: Seconds
    """Longest time in which all actors together must start."""
    answer_timeout_s: Seconds
    """An actor that has not answered for this long is declared dead, whether its process is gone or hangs."""
    restarts: Annotated[int, Field(ge=0, le=1000)]
    """A collector, or what evaluates, that dies is replaced so many times within `restart_window_s`, while the others
    go on; after that its death is one of the run. 0: never. With `runtime: local` there are no processes to replace."""
    run_restarts: Annotated[int, Field(ge=0, le=1000)]
    """What cannot be replaced alone, such as a rank or a process of TransferQueue, ends the attempt when it dies. The
    command then goes on from the newest checkpoint, so many times within `restart_window_s`. 0: never. The same failure
    at the same step twice ends the command. With `runtime: local` no process dies alone."""
    restart_window_s: Seconds
    """A restart counts for this long."""
    restart_pause_s: Annotated[float, Field(ge=0, le=3600)]
    """Wait before the first restart within the window; each further one waits twice as long, at most a minute."""
    starve_timeout_s: Seconds
    """Longest wait for the next group while the trainer is idle; after it the run ends."""
    stop_timeout_s: Seconds
    """Longest orderly stop; after it actors are killed."""


class Checkpoint(Section):
    """When the state of a run is kept, so that `asyncrl train --resume` can go on from there (docs/resume.md)."""

    every_steps: Count | None
    """Keep a checkpoint, from which a run can be resumed, after every so many training steps; null: steps make none."""
    every_s: Seconds | None
    """Keep a checkpoint after the first step that ends so long after the last one; null: time makes none."""
    at_end: bool
    """Keep a checkpoint when the run ends at a limit, at the end of its data, or by Ctrl-C, SIGTERM or SIGHUP."""
    keep: Count
    """How many checkpoints are kept; older ones are removed once a newer one is whole."""
    timeout_s: Seconds
    """A checkpoint that takes longer is given up, with a warning."""

    @property
    def is_kept(self) -> bool:
        """Whether a run keeps any checkpoint."""
        return self.at_end or self.every_steps is not None or self.every_s is not None
