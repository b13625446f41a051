"""The final summary, `summary.json`: stable keys, folded from the event log."""

from typing import Any

from asyncrl.engine.ending import Ending
from asyncrl.engine.events.ledger import Ledger
from asyncrl.engine.events.progress import Means, Progress

FILE_NAME = "summary.json"


def summarise(
    *,
    ledger: Ledger,
    progress: Progress,
    ending: Ending,
    started_wall: float,
    ended_wall: float,
    data_plane_keys_left: int | None,
    bias_warning: float,
) -> dict[str, Any]:
    """Build the summary. Times are seconds from process creation; a value that never came to be is null."""
    first = progress.first_step_wall
    return {
        "steps": progress.steps,
        "batches": progress.batches,
        "seconds_total": round(ended_wall - started_wall, 3),
        "seconds_to_first_step": None if first is None else round(first - started_wall, 3),
        "reward_first_10": Means.mean(progress.rewards.first),
        "reward_last_10": Means.mean(progress.rewards.last),
        "reward_trained_last_10": Means.mean(progress.trained_rewards.last),
        "trained_tokens": progress.trained_tokens,
        "generated_tokens": progress.generated_tokens,
        "trained_age_histogram": {str(age): count for age, count in sorted(progress.ages.items())},
        "trained_age_max": max(progress.ages, default=None),
        "length_bias": {**progress.length_bias.summary(), "warn_below": bias_warning},
        "ledger": ledger.summary(),
        "data_plane_keys_left": data_plane_keys_left,
        "exit": {"code": ending.code, "reason": ending.reason},
    }
