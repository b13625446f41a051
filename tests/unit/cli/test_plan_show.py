"""`asyncrl plan show`: a picture of a step's plan from the event log."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from asyncrl.engine import metrics
from asyncrl.engine.cli import app
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.types import Planned, Put, StepEnded


def _run(
    folder: Path,
    lengths: Sequence[int],
    ranks: list[list[list[str]]],
    *,
    figures: dict[str, float] | None = None,
    updates: tuple[int, ...] = (),
    fillers: tuple[tuple[int, int], ...] = (),
    measured: tuple[float, ...] = (),
    predicted: tuple[float, ...] = (),
) -> Path:
    folder.mkdir()
    log = EventLog(clock=lambda: 0.0, wall=lambda: 0.0, path=folder / "events.jsonl")
    keys = [f"v0_p0_g{i}" for i in range(len(lengths))]
    log.append(Put(group=0, keys=keys, tags={"prompt_tokens": 2, "response_tokens": list(lengths)}))
    log.append(Planned(batch=0, step=1, ranks=ranks, fillers=1, updates=updates, filler_places=fillers))
    log.append(
        StepEnded(
            step=1,
            version=1,
            seconds=0.5,
            ages={"0": 2},
            samples=2,
            tokens=9,
            reward_sum=1.0,
            metrics=figures or {},
            rank_seconds=measured,
            predicted_seconds=predicted,
        )
    )
    log.close()
    return folder


def test_ranks_are_rows_and_micro_batches_blocks(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", [6, 2, 4], [[["v0_p0_g0"]], [["v0_p0_g1", "v0_p0_g2"]]])
    done = CliRunner().invoke(app, ["plan", "show", str(run)])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0] == "step 1: 2 ranks, 1 micro-batches each, 1 fillers"
    assert "8 tokens" in lines[1]
    assert "10 tokens" in lines[2]
    assert lines[2].count("#") > lines[1].count("#")


def test_a_plan_says_how_the_step_went(tmp_path: Path) -> None:
    """Predicted and measured seconds, waiting, fillers and padding; how many ranks read a group."""
    figures = {
        metrics.PLANNED_IMBALANCE: 1.0312,
        metrics.MEASURED_IMBALANCE: 1.25,
        metrics.RANK_SECONDS: 0.4,
        metrics.PREDICTED_SECONDS: 0.35,
        metrics.BUBBLE_FRACTION: 0.2,
        metrics.FILLER_FRACTION: 0.051,
        metrics.PADDING_FRACTION: 0.1,
    }
    run = _run(tmp_path / "run", [6, 2, 4], [[["v0_p0_g0"]], [["v0_p0_g1", "v0_p0_g2"]]], figures=figures)
    lines = CliRunner().invoke(app, ["plan", "show", str(run)]).output.splitlines()
    assert lines[3:] == [
        "a group is read by 2.00 ranks",
        "costliest rank over the mean: 1.0312 planned, 1.2500 measured; step took 0.500 s",
        "slowest rank: 0.350 s predicted, 0.400 s measured; ranks wait for it during 20.0% of their time",
        "fillers are 5.1% of the cost, padding 10.0% of the positions",
    ]


def test_a_bar_stands_between_updates_and_a_filler_is_dots(tmp_path: Path) -> None:
    """Two updates of one and of two micro-batches; the second update's shortest sample fills rank 1's last place."""
    g = [f"v0_p0_g{i}" for i in range(6)]
    ranks = [[[g[0]], [g[2], g[3]], [g[4]]], [[g[1]], [g[5]], [g[4]]]]
    run = _run(tmp_path / "run", [18, 8, 8, 6, 8, 13], ranks, updates=(1, 2))
    lines = CliRunner().invoke(app, ["plan", "show", str(run)]).output.splitlines()
    assert lines[0] == "step 1: 2 ranks, 3 micro-batches each in 2 updates, 1 fillers"
    assert lines[1].split("tokens  ")[1] == f"[{'#' * 23}] | [{'#' * 20}][{'#' * 10}]"
    assert lines[2].split("tokens  ")[1] == f"[{'#' * 10}] | [{'#' * 17}][{'.' * 10}]"


def test_the_log_says_which_micro_batch_is_the_filler(tmp_path: Path) -> None:
    """Two ranks have the same key. An older log does not say which one is the filler: the later is taken for it."""
    ranks = [[["v0_p0_g0"]], [["v0_p0_g0"]]]

    def drawn(name: str, fillers: tuple[tuple[int, int], ...]) -> list[bool]:
        run = _run(tmp_path / name, [6, 2], ranks, fillers=fillers)
        lines = CliRunner().invoke(app, ["plan", "show", str(run)]).output.splitlines()
        return ["." in line.split("[")[1] for line in lines[1:3]]

    assert drawn("named", ((0, 0),)) == [True, False]
    assert drawn("older", ()) == [False, True]


def test_each_rank_has_its_predicted_and_measured_seconds(tmp_path: Path) -> None:
    """Nothing is predicted in the first steps; older logs have neither, and end with the blocks."""
    ranks = [[["v0_p0_g0"]], [["v0_p0_g1"]]]

    def rows(name: str, **seconds: Any) -> list[str]:
        run = _run(tmp_path / name, [6, 2], ranks, **seconds)
        lines = CliRunner().invoke(app, ["plan", "show", str(run)]).output.splitlines()
        return [line.rpartition("]")[2] for line in lines[1:3]]

    both = rows("both", measured=(0.4, 0.25), predicted=(0.35, 0.2))
    assert [text.strip() for text in both] == [
        "0.350 s predicted, 0.400 s measured",
        "0.200 s predicted, 0.250 s measured",
    ]
    assert [text.strip() for text in rows("first", measured=(0.4, 0.25))] == [
        "0.400 s measured",
        "0.250 s measured",
    ]
    assert rows("older") == ["", ""]


def test_a_wrong_folder_or_step_ends_with_code_2_and_says_what_there_is(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", [6], [[["v0_p0_g0"]]])
    gone = CliRunner().invoke(app, ["plan", "show", str(tmp_path / "no")])
    wrong = CliRunner().invoke(app, ["plan", "show", str(run), "--step", "9"])
    assert (gone.exit_code, wrong.exit_code) == (2, 2)
    assert "the folder does not exist" in gone.output
    assert "steps 1 to 1" in wrong.output
