"""What each staleness mode and option does to length bias and throughput, in virtual time.

The setting: 32 groups a batch, bound 2 (so 96 groups of run-ahead), durations log-normal with σ = 1
and mean 1, lengths proportional to durations, one batch trained in a third of a unit of time. The
real controller, front end and collectors run around a fake generator and trainer. Prints a table;
the last line is one JSON object.
"""

import argparse
import json
import logging
from typing import Any

import numpy as np
import structlog

from asyncrl.engine.events.types import Settled
from asyncrl.engine.testing.fakes import FakeTask
from asyncrl.engine.testing.simulation import Outcome, simulate, simulated_config
from asyncrl.engine.testing.spanning import SpanningGenerator
from asyncrl.engine.testing.virtual_time import virtual_clock

GROUPS_PER_STEP = 32
BOUND = 2
STEP_SECONDS = 1 / 3
TOKENS_PER_UNIT = 50

VARIANTS: dict[str, dict[str, object]] = {
    "drop": {},
    "drop + pacing": {"rollout.pacing": True},
    "drop + cancel": {"rollout.cancel_stale": True},
    "drop + cancel + requeue 3": {"rollout.cancel_stale": True, "rollout.requeue_tries": 3},
    "drop + requeue 3": {"rollout.requeue_tries": 3},
    "gate": {"rollout.stale_mode": "gate", "rollout.gate_timeout_s": 1000.0},
    "gate + pacing": {"rollout.stale_mode": "gate", "rollout.gate_timeout_s": 1000.0, "rollout.pacing": True},
    "tokens": {"rollout.stale_mode": "tokens"},
}


def durations() -> np.ndarray[Any, Any]:
    """Return the durations of groups 0, 1, …: log-normal, σ = 1, mean 1."""
    return np.random.default_rng(0).lognormal(-0.5, 1.0, 100_000)


def run(options: dict[str, object], batches: int) -> Outcome:
    takes = durations()
    generator = SpanningGenerator(
        seconds=lambda call: float(takes[call]),
        length=lambda call: 2 + int(takes[call] * TOKENS_PER_UNIT),
        clock=virtual_clock,
    )
    config = simulated_config(
        **{
            "rollout.groups_per_step": GROUPS_PER_STEP,
            "rollout.group_size": 2,
            "rollout.max_staleness": BOUND,
            "run.steps": None,
            "run.batches": batches,
            "trainer.micro_batch_tokens": 100_000,
            "collector.group_timeout_s": 1e6,
            "supervision.starve_timeout_s": 1e6,
            **options,
        }
    )
    return simulate(config, generators=[generator], task=FakeTask(64), rank_seconds=lambda _: STEP_SECONDS)


def lengths_of(outcome: Outcome, durations: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Return mean durations of trained groups and of all that ended before the run did.

    The n-th call of the generator is for group n, so this also counts groups that were cancelled,
    whose length no run can know.
    """
    trained, ended = [], []
    for event in outcome.of(Settled):
        if "dropped:run_ended" not in event.fates:
            ended.append(durations[event.group])
            if "trained" in event.fates:
                trained.append(durations[event.group])
    return float(np.mean(trained)), float(np.mean(ended))


def figures(outcome: Outcome) -> dict[str, float | None]:
    if outcome.ending.code:
        raise SystemExit(f"a run failed: {outcome.ending}")
    bias = outcome.progress.length_bias
    steps = outcome.progress.steps
    groups = bias.trained.samples / 2
    trained, ended = lengths_of(outcome, durations())
    return {
        "length_ratio": round(trained / ended, 3),
        "reported_ratio": None if bias.ratio is None else round(bias.ratio, 3),
        "over_age": sum(n for age, n in outcome.progress.ages.items() if age > BOUND),
        "groups_per_unit": round(groups / outcome.seconds, 1),
        "trained_token_share": round(outcome.progress.trained_tokens / max(1, bias.generated.tokens), 3),
        "trainer_idle": round(1 - steps * STEP_SECONDS / outcome.seconds, 3),
        "stale_groups": outcome.ledger.by_reason("dropped").get("stale", 0) / 2,
        "cancelled_groups": outcome.ledger.by_reason("dropped").get("cancelled_stale", 0) / 2,
        "mean_age": round(
            sum(age * n for age, n in outcome.progress.ages.items()) / max(1, outcome.progress.ages.total()), 2
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=300)
    batches = parser.parse_args().batches
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    table = {name: figures(run(options, batches)) for name, options in VARIANTS.items()}
    columns = list(next(iter(table.values())))
    print("| mode | " + " | ".join(columns) + " |")
    print("|---|" + "---|" * len(columns))
    for name, row in table.items():
        print(f"| {name} | " + " | ".join(str(row[column]) for column in columns) + " |")
    print(json.dumps(table))


if __name__ == "__main__":
    main()
