"""The fate of a sample, its one final state, and the reasons that asyncrl itself gives.

A fate is written `trained`, or `masked:<reason>`, `dropped:<reason>`, `failed:<reason>`.
"""

TRAINED = "trained"
MASKED = "masked"
DROPPED = "dropped"
FAILED_FATE = "failed"

# Reasons that do not come from a filter.
STALE = "stale"
FEW_LIVE = "few_live"
NAN_REWARD = "nan_reward"
NO_TOKENS = "no_trainable_tokens"
OVER_BUDGET = "over_budget"
CANCELLED = "cancelled_stale"
RECALLED = "recalled"
NOT_RESTORED = "not_restored"
"""A group was in flight at the checkpoint from which the run was resumed; its prompt was issued again."""
COLLECTOR_DIED = "collector_died"
"""A group was in flight on a collector that died; its prompt was issued again."""
QUEUE_TIMEOUT = "queue_timeout"
RUN_ENDED = "run_ended"


def masked(reason: str) -> str:
    return f"{MASKED}:{reason}"


def dropped(reason: str) -> str:
    return f"{DROPPED}:{reason}"


def failed(reason: str) -> str:
    return f"{FAILED_FATE}:{reason}"


def split_fate(fate: str) -> tuple[str, str]:
    """Return kind and reason of a fate; the reason of `trained` is empty."""
    kind, _, reason = fate.partition(":")
    return kind, reason
