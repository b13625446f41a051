"""What each staleness mode and option does to length bias and throughput, in virtual time.

Three settings, each 32 groups a batch; the real controller, front end and collectors run around a
fake generator and trainer. Lengths are proportional to durations.

1. Modes: bound 2 (so 96 groups of run-ahead), durations log-normal with σ = 1 and mean 1, one batch
   trained in a third of a unit of time: training and generation are equally fast.
2. A trainer three times as slow, bound 4: what is generated waits, and ages. Here pacing shows.
3. One pass over 1,600 prompts, hard ones long: of the variance of the log-duration 64 % is the
   prompt's and 36 % the try's; bound 2. A prompt whose group is lost to age is lost for good, unless it
   is issued again. Here requeueing shows.

Prints a table each; the last line is one JSON object.
"""

import argparse
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from asyncrl.collectors.generators.base import Completion, GroupRequest
from asyncrl.engine.aio.virtual_time import virtual_clock
from asyncrl.engine.events.types import Dispatched, Settled
from asyncrl.engine.model.tokenizer import CharTokenizer
from asyncrl.engine.records.fate import RUN_ENDED, TRAINED, dropped
from asyncrl.engine.testing.conformance.spanning import SpanningGenerator
from asyncrl.engine.testing.fakes import FakeGenerator, FakeTask
from asyncrl.engine.testing.simulation import Outcome, simulate, simulated_config

GROUPS_PER_STEP = 32
GROUP_SIZE = 2
TOKENS_PER_UNIT = 50
PROMPTS = 1600
_TRIES = 50

Options = Mapping[str, object]
Row = dict[str, float | None]
Floats = NDArray[np.float64]

GATE = {"rollout.stale_mode": "gate", "rollout.gate_timeout_s": 1000.0}
CANCEL = {"rollout.cancel_stale": True}
MODES: dict[str, Options] = {
    "drop": {},
    "drop + cancel": CANCEL,
    "gate": GATE,
    "tokens": {"rollout.stale_mode": "tokens"},
}
PACING: dict[str, Options] = {"slow trainer: drop": {}, "slow trainer: drop + pacing": {"rollout.pacing": True}}
ONE_PASS: dict[str, Options] = {
    "one pass: drop": {},
    "one pass: drop + requeue 1": {"rollout.requeue_tries": 1},
    "one pass: drop + requeue 3": {"rollout.requeue_tries": 3},
    "one pass: drop + cancel": CANCEL,
    "one pass: drop + cancel + requeue 3": {**CANCEL, "rollout.requeue_tries": 3},
    "one pass: gate": GATE,
}


def length(takes: float) -> int:
    return 2 + int(takes * TOKENS_PER_UNIT)


def durations() -> Floats:
    """Return the durations of groups 0, 1, …: log-normal, σ = 1, mean 1."""
    drawn: Floats = np.random.default_rng(0).lognormal(-0.5, 1.0, 100_000)
    return drawn


def durations_by_prompt() -> Floats:
    """Return durations (prompts, tries): σ = 0.8 over prompts and 0.6 over tries, so 1 together; mean 1."""
    rng = np.random.default_rng(0)
    takes: Floats = np.exp(rng.normal(0, 0.8, (PROMPTS, 1)) + rng.normal(0, 0.6, (PROMPTS, _TRIES)))
    takes /= takes.mean()
    return takes


@dataclass(slots=True)
class ByPrompt(FakeGenerator):
    """Takes as long for a prompt's n-th try as `takes[prompt, n]` says."""

    takes: Floats = field(default_factory=durations_by_prompt)
    tries: Counter[int] = field(default_factory=Counter)

    async def generate(self, request: GroupRequest) -> Sequence[Completion]:
        prompt = int(CharTokenizer().decode(list(request.prompt_ids)).rstrip(">"))
        takes = float(self.takes[prompt, self.tries[prompt]])
        self.tries[prompt] += 1
        once = FakeGenerator(seconds=lambda _: takes, length=lambda _: length(takes), version=self.version)
        return await once.generate(request)


def run(
    generator: FakeGenerator, options: Options, *, step_s: float, bound: int, batches: int | None, prompts: int
) -> Outcome:
    config = simulated_config(
        **{
            "rollout.groups_per_step": GROUPS_PER_STEP,
            "rollout.group_size": GROUP_SIZE,
            "rollout.max_staleness": bound,
            "run.steps": None,
            "run.batches": batches,
            "task.epochs": 1 if batches is None else None,
            "trainer.micro_batch_tokens": 100_000,
            "collector.group_timeout_s": 1e6,
            "supervision.starve_timeout_s": 1e6,
            **options,
        }
    )
    outcome = simulate(config, generators=[generator], task=FakeTask(prompts), rank_seconds=lambda _: step_s)
    if outcome.ending.code:
        raise SystemExit(f"a run failed: {outcome.ending}")
    return outcome


def figures(outcome: Outcome, *, step_s: float, bound: int, takes: Callable[[int], float]) -> Row:
    """Return the figures of a run; `takes` gives the duration of a group.

    `length_ratio` is of durations, of trained groups over all that ended before the run did; it also
    counts groups that were cancelled, whose length no run can know. `reported_ratio` is the run's own.
    """
    bias, ages = outcome.progress.length_bias, outcome.progress.ages
    ended = [event for event in outcome.of(Settled) if dropped(RUN_ENDED) not in event.fates]
    trained = [event for event in ended if TRAINED in event.fates]
    ratio = np.mean([takes(event.group) for event in trained]) / np.mean([takes(event.group) for event in ended])
    reasons = outcome.ledger.by_reason("dropped")
    return {
        "length_ratio": round(float(ratio), 3),
        "reported_ratio": None if bias.ratio is None else round(bias.ratio, 3),
        "over_age": sum(n for age, n in ages.items() if age > bound),
        "mean_age": round(sum(age * n for age, n in ages.items()) / max(1, ages.total()), 2),
        "groups_per_unit": round(len(trained) / outcome.seconds, 1),
        "trained_token_share": round(outcome.progress.trained_tokens / max(1, bias.generated.tokens), 3),
        "tokens_lost_to_age": bias.lost_tokens,
        "trainer_idle": round(1 - outcome.progress.steps * step_s / outcome.seconds, 3),
        "stale_groups": reasons.get("stale", 0) / GROUP_SIZE,
        "cancelled_groups": reasons.get("cancelled_stale", 0) / GROUP_SIZE,
    }


def by_call(options: Options, *, step_s: float, bound: int, batches: int) -> Row:
    """Run with durations that do not depend on the prompt; the n-th call of the generator is for group n."""
    takes = durations()
    generator = SpanningGenerator(
        seconds=lambda call: float(takes[call]), length=lambda call: length(takes[call]), clock=virtual_clock
    )
    outcome = run(generator, options, step_s=step_s, bound=bound, batches=batches, prompts=64)
    return figures(outcome, step_s=step_s, bound=bound, takes=lambda group: float(takes[group]))


def one_pass(options: Options) -> Row:
    """Run once over the prompts; also say which part of them, and of the hardest tenth, was trained on."""
    generator = ByPrompt()
    step_s, bound = 1 / 3, 2
    outcome = run(generator, options, step_s=step_s, bound=bound, batches=None, prompts=PROMPTS)
    duration: dict[int, float] = {}
    tries: Counter[int] = Counter()
    prompts = {event.group: event.prompt for event in outcome.of(Dispatched)}
    for group, prompt in sorted(prompts.items()):
        duration[group] = float(generator.takes[int(prompt), tries[int(prompt)]])
        tries[int(prompt)] += 1
    reached = {prompts[event.group] for event in outcome.of(Settled) if TRAINED in event.fates}
    hardest = set(np.argsort(generator.takes.mean(axis=1))[-PROMPTS // 10 :].tolist())
    row = figures(outcome, step_s=step_s, bound=bound, takes=duration.__getitem__)
    return {
        "prompts_reached": round(len(reached) / PROMPTS, 3),
        "hardest_tenth_reached": round(len(reached & hardest) / len(hardest), 3),
        **row,
    }


def show(title: str, table: Mapping[str, Row]) -> None:
    columns = list(next(iter(table.values())))
    print(f"\n{title}\n")
    print("| mode | " + " | ".join(columns) + " |")
    print("|---|" + "---|" * len(columns))
    for name, row in table.items():
        print(f"| {name} | " + " | ".join(str(row[column]) for column in columns) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", type=int, default=300, help="batches of the first two settings")
    batches: Any = parser.parse_args().batches
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    modes = {name: by_call(options, step_s=1 / 3, bound=2, batches=batches) for name, options in MODES.items()}
    show("Modes: training and generation equally fast, bound 2", modes)
    pacing = {name: by_call(options, step_s=1.0, bound=4, batches=batches) for name, options in PACING.items()}
    show("Pacing: a trainer three times as slow, bound 4", pacing)
    passes = {name: one_pass(options) for name, options in ONE_PASS.items()}
    show(f"Requeueing: one pass over {PROMPTS} prompts, hard ones long, bound 2", passes)
    print(json.dumps({**modes, **pacing, **passes}))


if __name__ == "__main__":
    main()
