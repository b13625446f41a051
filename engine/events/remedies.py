"""What would help against a cause of lost samples, with the run's options and their values."""

import re
from collections.abc import Mapping
from typing import Any

from asyncrl.engine.records.fate import (
    CANCELLED,
    COLLECTOR_DIED,
    FAILED_FATE,
    FEW_LIVE,
    NAN_REWARD,
    NO_TOKENS,
    OVER_BUDGET,
    QUEUE_TIMEOUT,
    RECALLED,
    STALE,
    split_fate,
)

_AGE = "raise {rollout.max_staleness}, add generators, or see {rollout.stale_mode}"
_CUT = "raise {rollout.max_new_tokens}"
_FLAT = (
    "rewards within a group do not differ: take prompts that are neither solved nor hopeless, "
    "or raise {rollout.group_size}"
)
# By reason. {section.key} is replaced by the option and its value.
_REMEDIES = {
    OVER_BUDGET: "raise {trainer.micro_batch_tokens}, or lower {rollout.max_new_tokens}",
    STALE: _AGE,
    "staleness/stale": _AGE,
    "staleness/stale_tokens": _AGE,
    CANCELLED: _AGE,
    RECALLED: "a collector brought nothing in twice the time of the others: look at its device, or lower "
    "{collector.count}",
    "zero_std": _FLAT,
    "dynamic_sampling/out_of_band": "widen low and high of the filter dynamic_sampling, or take other prompts",
    "difficulty/too_hard": "lower low of the filter difficulty, or take easier prompts",
    "difficulty/too_easy": "raise high of the filter difficulty, or take harder prompts",
    "overlong": _CUT,
    "truncated": _CUT,
    "duplicate": "raise {rollout.temperature}",
    "duplicate/few_distinct": "raise {rollout.temperature}",
    "importance_outliers": "trainer and generators disagree: look at train/ratio_mean and {model.dtype}, lower "
    "{rollout.max_staleness}, or raise max_log_ratio of the filter",
    COLLECTOR_DIED: "collectors died and were replaced: log.jsonl has the causes; look at their memory",
    NAN_REWARD: "rewards must be finite numbers: look at the task or the reward functions",
    NO_TOKENS: "responses are empty: look at the prompts and at what ends a response",
    FEW_LIVE: "few samples of a group have a finite reward and a token to train: look at the task or the reward "
    "functions, and at {rollout.min_live}",
    "lease_lost": "raise {data_plane.lease_s}",
    "timeout": "raise {collector.group_timeout_s}",
    QUEUE_TIMEOUT: "raise {collector.queue_timeout_s}, or add collectors",
    "score_timeout": "raise {collector.score_timeout_s}",
    "score_error": "a score raised; log.jsonl has the errors",
}
_OPTION = re.compile(r"\{([\w.]+)\}")


def remedy(fate: str, config: Mapping[str, Any]) -> str:
    """Return what would help against a fate; `config` is that of `run_started`, and may lack keys."""
    kind, reason = split_fate(fate)
    text = _REMEDIES.get(reason)
    if text is None:
        text = "log.jsonl has the errors" if kind == FAILED_FATE else f"see `asyncrl filters show {filter_of(reason)}`"
    return with_options(text, config)


def filter_of(reason: str) -> str:
    """Return the name of the filter that gives this reason."""
    return reason.partition("/")[0]


def with_options(text: str, config: Mapping[str, Any]) -> str:
    """Replace each {section.key} in a text by the option and its value, if known."""
    return _OPTION.sub(lambda found: _named(found[1], config), text)


def _named(path: str, config: Mapping[str, Any]) -> str:
    section, _, key = path.partition(".")
    values = config.get(section, {})
    return f"{path} (now {values[key]})" if key in values else path
