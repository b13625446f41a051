"""The final summary, `summary.json`. Its keys are stable, and it follows from the event log."""

from typing import Any

from asyncrl.engine.events.ledger import Ledger
from asyncrl.engine.events.means import Means
from asyncrl.engine.events.progress import Progress
from asyncrl.engine.events.types import AnyEvent, RunEnded, RunStarted
from asyncrl.engine.records.ending import Ending

FILE_NAME = "summary.json"


class Ends:
    """A fold that keeps the first and the last event of a run."""

    def __init__(self) -> None:
        self.started: RunStarted | None = None
        self.ended: RunEnded | None = None
        self.last_s = 0.0

    def apply(self, event: AnyEvent) -> None:
        self.last_s = event.t
        if isinstance(event, RunStarted):
            self.started = event
        elif isinstance(event, RunEnded):
            self.ended = event


def summarise_log(
    ledger: Ledger, progress: Progress, ends: Ends, *, bias_warning: float | None = None
) -> dict[str, Any]:
    """Build the summary from folds only."""
    started, ended, lead_s = ends.started, ends.ended, 0.0
    if started is not None:
        if started.process_wall is not None:
            # A clock that was set back meanwhile tells nothing of the time before the log.
            lead_s = max(0.0, started.wall - started.process_wall - started.t)
        bias_warning = started.config.get("rollout", {}).get("bias_warning", bias_warning)
    return {
        **summarise(
            ledger=ledger,
            progress=progress,
            ending=Ending(1, "the log breaks off") if ended is None else Ending(ended.code, ended.reason),
            began_s=-lead_s,
            ended_s=ends.last_s,
            data_plane_keys_left=None if ended is None else ended.keys_left,
            bias_warning=bias_warning,
        ),
        "filters": (None if ended is None else ended.filters) or {},
        "model": None if ended is None else ended.model,
        "skipped_records": (None if ended is None else ended.skipped) or {},
    }


def summarise(
    *,
    ledger: Ledger,
    progress: Progress,
    ending: Ending,
    began_s: float,
    ended_s: float,
    data_plane_keys_left: int | None,
    bias_warning: float | None,
) -> dict[str, Any]:
    """Build the summary. Times are seconds from `began_s`: process creation, or the call of `run`, in the log's time.

    That time does not follow a wall clock that is set during the run. A value that never came to be is null.
    """
    first = progress.first_step_s
    return {
        "steps": progress.steps,
        "batches": progress.batches,
        "seconds_total": round(ended_s - began_s, 3),
        "seconds_to_first_step": None if first is None else round(first - began_s, 3),
        "reward_first_10": Means.mean(progress.rewards.first),
        "reward_last_10": Means.mean(progress.rewards.last),
        "reward_trained_last_10": Means.mean(progress.trained_rewards.last),
        "evaluation": progress.evaluations.summary(),
        "reward_parts": progress.reward_parts.summary(),
        "reward_on_failure_samples": progress.reward_parts.stood_in,
        "trained_tokens": progress.trained_tokens,
        "generated_tokens": progress.generated_tokens,
        "engine_busy_share": progress.engine_busy_share,
        "trained_age_histogram": {str(age): count for age, count in sorted(progress.ages.items())},
        "trained_age_max": max(progress.ages, default=None),
        "length_bias": {**progress.length_bias.summary(), "warn_below": bias_warning},
        "alarms": progress.alarms.summary(),
        "ledger": ledger.summary(),
        "data_plane_keys_left": data_plane_keys_left,
        "exit": {"code": ending.code, "reason": ending.reason},
    }
