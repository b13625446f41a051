"""How well `asyncrl simulate` predicts: seed 2 from seed 1 of the default preset, and other bounds from S = 2.

    .venv/bin/python scripts/bench_simulate.py [--runtime ray] [--runs FOLDER] [--repeats 2]

Records runs (or takes recorded ones with --runs), fits, predicts, compares. Other work on the machine only
ever makes a run slower, and what it will be during another run nobody can predict. So seeds 1 and 2 take
turns, `--repeats` times each; the fit is on the quietest run of seed 1, and is compared with the quietest of
seed 2: that of the least median step. `noise` is by how much the repeats of one seed differ; where it is not
well below the errors, those are the machine's. Step time is the median of the run's steps, so that neither the
first ones nor single stalls decide. `any pair` is the largest error, either way, of any run of seed 1 about any of
seed 2: what one gets who has one run of each. Prints a table; the last line is one JSON object. `error` is
(predicted - recorded) / recorded, by figure.
"""

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import structlog

from asyncrl.configs import Override, load
from asyncrl.engine.events.log import effective_events
from asyncrl.engine.events.types import AnyEvent
from asyncrl.engine.simulate.durations import Constant, LogNormal
from asyncrl.engine.simulate.fit import Fitted
from asyncrl.engine.simulate.profile import Given
from asyncrl.engine.simulate.run import predict
from asyncrl.engine.simulate.timeline import Timeline
from asyncrl.engine.trace.recording import Recording

COMPARED = ("mean_age", "trained_share", "step_seconds_median", "seconds_per_step", "groups_per_second")
STEP = "step_seconds_median"


def record(folder: Path, *options: str) -> Path:
    if not folder.exists():
        command = [sys.executable, "-m", "asyncrl", "train", "--run-dir", str(folder), *options]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return folder


def taking_turns(runs: Path, name: str, repeats: int, *options: str) -> dict[int, list[Path]]:
    """Record both seeds, one after the other, `repeats` times; the first of each may be there from before."""
    found: dict[int, list[Path]] = {1: [], 2: []}
    for repeat in range(1, repeats + 1):
        for seed, folders in found.items():
            folder = runs / (f"{name}{seed}" if repeat == 1 else f"{name}{seed}-{repeat}")
            folders.append(record(folder, *options, "--seed", str(seed)))
    return found


def quietest(recorded: list[list[AnyEvent]]) -> list[AnyEvent]:
    return min(recorded, key=lambda events: figures_of(events)[STEP])


def noise(recorded: list[list[AnyEvent]]) -> float | None:
    """Return by how much the slowest repeat's step is above the fastest one's; None of a single run."""
    steps = [figures_of(events)[STEP] for events in recorded]
    return round(max(steps) / min(steps) - 1, 4) if len(steps) > 1 else None


def figures_of(events: list[AnyEvent]) -> dict[str, Any]:
    figures = Timeline()
    for event in events:
        figures.apply(event)
    return figures.summary()


def predicted(events: list[AnyEvent], changes: dict[str, Any]) -> dict[str, Any]:
    values = [*Recording(events).values(), *(Override(path, v, "bench") for path, v in changes.items())]
    prediction = predict(load("default", values).config, Fitted(events))
    if prediction.ending.code:
        raise SystemExit(f"a simulated run failed: {prediction.ending}")
    return prediction.figures


def compare(name: str, guess: dict[str, Any], truth: dict[str, Any]) -> dict[str, float]:
    errors = {}
    for key in COMPARED:
        errors[key] = round((guess[key] - truth[key]) / truth[key], 4) if truth[key] else round(guess[key], 4)
        print(f"| {name} | {key} | {truth[key]:.4g} | {guess[key]:.4g} | {errors[key]:+.1%} |")
    return errors


def worst_pair(fitted: list[list[AnyEvent]], recorded: list[list[AnyEvent]]) -> dict[str, float]:
    """Return, by figure, the largest error of a prediction from one run about another, whichever two."""
    guesses = [predicted(events, {"run.seed": 2}) for events in fitted]
    truths = [figures_of(events) for events in recorded]
    return {
        key: round(max(abs(guess[key] - truth[key]) / (truth[key] or 1) for guess in guesses for truth in truths), 4)
        for key in COMPARED
    }


def at_scale(generators: int, ranks: int, steps: int) -> dict[str, float]:
    """Run a large configuration; returns seconds of this process, and how many groups it simulated in each."""
    values = {
        "collector.count": generators,
        "trainer.ranks": ranks,
        "rollout.groups_per_step": generators,
        "rollout.group_size": 8,
        "rollout.max_new_tokens": 512,
        "trainer.micro_batch_tokens": 8192,
        "run.steps": steps,
    }
    config = load("default", [Override(path, v, "bench") for path, v in values.items()]).config
    profile = Given(load_prompts(), LogNormal(20.0, 0.5), Constant(8.0), 512)
    began = time.perf_counter()
    prediction = predict(config, profile)
    took = time.perf_counter() - began
    return {
        "generators": generators,
        "ranks": ranks,
        "steps": prediction.figures["steps"],
        "virtual_seconds": prediction.figures["seconds"],
        "wall_seconds": round(took, 1),
        "groups_per_wall_second": round(steps * generators / took, 1),
    }


def load_prompts() -> Any:
    from asyncrl.collectors.tasks import load_task

    return load_task("reverse", {}).prompts()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runtime", default="local", choices=["local", "ray"])
    parser.add_argument("--runs", type=Path, help="Folder of recorded runs, kept and used again.")
    parser.add_argument("--repeats", type=int, default=2, help="Runs of each seed, taking turns.")
    parser.add_argument("--scale-steps", type=int, default=3)
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with tempfile.TemporaryDirectory() as temporary:
        runs: Path = arguments.runs or Path(temporary)
        run = ("--runtime", arguments.runtime)
        print("| case | figure | recorded | predicted | error |\n|---|---|---|---|---|")
        result: dict[str, Any] = {"runtime": arguments.runtime}
        folders = taking_turns(runs, arguments.runtime, arguments.repeats, *run)
        one, two = ([list(effective_events(folder)) for folder in folders[seed]] for seed in (1, 2))
        guess = predicted(quietest(one), {"run.seed": 2})
        result["seed 2 from seed 1"] = compare("seed 2", guess, figures_of(quietest(two)))
        result["any pair"] = worst_pair(one, two)
        result["noise"] = {"seed 1": noise(one), "seed 2": noise(two)}
        print(f"step times of one seed differ by {result['noise']} between its {arguments.repeats} runs")
        sleepy = ("--config", "sleepy", *run)
        fitted = list(effective_events(record(runs / "sleepy2", *sleepy, "--max-staleness", "2")))
        for bound in (0, 1, 4):
            truth = list(effective_events(record(runs / f"sleepy{bound}", *sleepy, "--max-staleness", str(bound))))
            name = f"sleepy S={bound} from S=2"
            result[name] = compare(name, predicted(fitted, {"rollout.max_staleness": bound}), figures_of(truth))
        result["scale"] = at_scale(1024, 512, arguments.scale_steps)
        print(json.dumps(result))


if __name__ == "__main__":
    main()
