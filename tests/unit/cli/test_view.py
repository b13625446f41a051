"""What a run shows, from folds that were fed events by hand."""

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from asyncrl.engine.cli.view import View, final_lines, number
from asyncrl.engine.events.ledger import Ledger
from asyncrl.engine.events.progress import Progress
from asyncrl.engine.events.summary import summarise
from asyncrl.engine.events.types import (
    AnyEvent,
    BatchGivenUp,
    BatchJudged,
    Claimed,
    Dispatched,
    Judged,
    Put,
    Settled,
    StepEnded,
    StepStarted,
)
from asyncrl.engine.loop.controller import Controller
from asyncrl.engine.records.ending import Ending
from asyncrl.engine.testing.simulation import simulate, simulated_config


def group_events(group: int, fates: list[str], *, trained: bool) -> list[AnyEvent]:
    """One group's life, from dispatch to fates."""
    start: list[AnyEvent] = [
        Dispatched(group=group, prompt=0, dataset="d", size=len(fates), collector="c"),
        Put(group=group, keys=[], tags={"response_tokens": [3] * len(fates)}),
        Claimed(claim="x", fence=1, groups=[group]),
    ]
    step: list[AnyEvent] = [StepStarted(step=1, version=0, groups=[group])] if trained else []
    return [*start, *step, Settled(group=group, fates=fates)]


EVENTS: list[AnyEvent] = [
    *group_events(0, ["trained", "trained", "masked:nan_reward", "failed:score_error"], trained=True),
    *group_events(1, ["dropped:[/odd] reason", "dropped:zero_std"], trained=False),
    Dispatched(group=2, prompt=0, dataset="d", size=3, collector="c"),
    BatchJudged(batch=0, judged=2, kept=1, attempts=1, reward_sum=2.0, reward_count=5),
    StepEnded(
        step=1,
        version=1,
        seconds=1.0,
        ages={"0": 1, "2": 1},
        samples=2,
        tokens=6,
        reward_sum=1.5,
        metrics={"engine/busy_share": 0.97},
        t=107.0,
    ),
]


def folds(events: list[AnyEvent]) -> tuple[Ledger, Progress]:
    ledger, progress = Ledger(), Progress()
    for event in events:
        ledger.apply(event)
        progress.apply(event)
    return ledger, progress


def view_of(events: list[AnyEvent], times: list[float]) -> tuple[View, io.StringIO]:
    ledger, progress = folds(events)
    out = io.StringIO()
    clock = iter(times)
    console = Console(file=out, width=200)
    return View(ledger=ledger, progress=progress, console=console, clock=lambda: next(clock)), out


def test_a_line_names_what_there_is_to_see() -> None:
    view, _ = view_of(EVENTS, [0.0])
    assert view.line() == (
        "step 1 (1 batches judged)  reward 0.400  ages 0: 1, 2: 1  kept 1/2 groups  masked nan_reward: 1  "
        "dropped [/odd] reason: 1, zero_std: 1  failed score_error: 1  tok/s 0 trained, 0 generated  "
        "engines 97% busy"
    )


def test_nothing_yet_shows_as_nothing() -> None:
    view, _ = view_of([], [0.0])
    assert view.line() == "step 0 (0 batches judged)  tok/s 0 trained, 0 generated"


def test_the_table_shows_the_same_figures_whatever_their_characters() -> None:
    """A user's drop reason may look like markup; it must neither vanish nor break the view."""
    view, out = view_of(EVENTS, [0.0, 0.0])
    figures = view.figures()
    Console(file=out, width=200).print(view.table())
    for name, value in figures.items():
        assert any(line.split() == [*name.split(), *value.split()] for line in out.getvalue().splitlines())


def test_rates_are_over_the_last_seconds() -> None:
    ledger, progress = folds([])
    now = [0.0]
    view = View(ledger=ledger, progress=progress, console=Console(file=io.StringIO()), clock=lambda: now[0])
    for second in range(30):
        now[0] = float(second)
        progress.trained_tokens += 100 if second < 15 else 400
        progress.generated_tokens += 50
        last = view.figures()["tok/s"]
    assert last == "400 trained, 50 generated"


def test_the_first_line_and_one_after_a_long_silence_have_rates() -> None:
    """FOUND-I16: from the start of the run, and since the line before."""
    ledger, progress = folds([])
    now = [100.0]
    view = View(ledger=ledger, progress=progress, console=Console(file=io.StringIO()), clock=lambda: now[0])
    seen = []
    simulate(simulated_config(run__steps=1), beside=watched_by(view))
    for second, tokens in ((102.0, 500), (150.0, 4800)):
        now[0] = second
        progress.trained_tokens += tokens
        seen.append(view.figures()["tok/s"])
    assert seen == ["250 trained, 0 generated", "100 trained, 0 generated"]


def watched_by(view: View) -> Callable[[Controller], Any]:
    async def beside(controller: Controller) -> None:
        view.watch(controller)

    return beside


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (float("nan"), "-"), (float("inf"), "-"), (0.0, "0.000"), (0.98765, "0.988")]
)
def test_a_number_that_is_none_shows_as_a_dash(value: float | None, text: str) -> None:
    assert number(value) == text


def summary_of(events: list[AnyEvent], keys_left: int | None = 0) -> dict[str, Any]:
    ledger, progress = folds(events)
    return summarise(
        ledger=ledger,
        progress=progress,
        ending=Ending(0, "step limit reached"),
        began_s=100.0,
        ended_s=130.5,
        data_plane_keys_left=keys_left,
        bias_warning=0.9,
    )


def test_the_summary_has_its_stable_keys() -> None:
    summary = summary_of(EVENTS)
    promised = {
        "steps": 1,
        "seconds_total": 30.5,
        "seconds_to_first_step": 7.0,
        "reward_first_10": 0.4,
        "reward_last_10": 0.4,
        "reward_trained_last_10": 0.75,
        "reward_parts": {},
        "reward_on_failure_samples": 0,
        "trained_age_histogram": {"0": 1, "2": 1},
        "trained_age_max": 2,
        "ledger": {
            "dispatched": 9,
            "trained": 2,
            "in_flight": 3,
            "buffered": 0,
            "claimed": 0,
            "in_training": 0,
            "masked": {"nan_reward": 1},
            "dropped": {"[/odd] reason": 1, "zero_std": 1},
            "failed": {"score_error": 1},
        },
        "data_plane_keys_left": 0,
        "exit": {"code": 0, "reason": "step limit reached"},
    }
    assert {key: summary[key] for key in promised} == promised
    assert set(summary) - set(promised) <= {
        *("batches", "trained_tokens", "generated_tokens", "engine_busy_share", "length_bias", "alarms", "evaluation")
    }


def test_a_run_without_a_step_has_nulls_and_no_nan() -> None:
    """I6: absent values are null."""
    summary = summary_of([], None)
    for key in ("seconds_to_first_step", "reward_first_10", "reward_last_10", "reward_trained_last_10"):
        assert summary[key] is None
    assert (summary["trained_age_max"], summary["data_plane_keys_left"], summary["steps"]) == (None, None, 0)


def test_the_first_and_the_last_ten_batches_are_weighed_by_samples() -> None:
    """Over samples, not over batches; those without survivors count."""
    judged: list[AnyEvent] = [
        BatchJudged(
            batch=i, judged=1, kept=i % 2, attempts=1, reward_sum=float(i * (1 + i % 3)), reward_count=1 + i % 3
        )
        for i in range(25)
    ]
    summary = summary_of(judged)
    for key, batches in (("reward_first_10", range(10)), ("reward_last_10", range(15, 25))):
        weights = [1 + i % 3 for i in batches]
        expected = sum(i * w for i, w in zip(batches, weights, strict=True)) / sum(weights)
        assert summary[key] == pytest.approx(expected)


def test_the_last_words_say_how_it_ended() -> None:
    lines = final_lines(summary_of(EVENTS), "runs/x")
    text = "\n".join(lines)
    for words in (
        "step limit reached (exit 0) after 1 steps, 1 batches judged, 30 s",
        "reward 0.400 in the first 10 batches, 0.400 in the last 10",
        "0: 1, 2: 1",
        "9 dispatched = 2 trained + masked [nan_reward: 1]",
        "failed [score_error: 1]",
        "runs/x",
    ):
        assert words in text


def biased(groups: int, *, cancelled: int = 0) -> list[AnyEvent]:
    """Every fourth group has prompt 1000, is ten times as long, and stale."""
    out: list[AnyEvent] = []
    for group in range(groups):
        stale = group % 4 == 0
        out += [
            Dispatched(group=group, prompt=1000 if stale else group, dataset="d", size=1, collector="c"),
            Put(group=group, keys=[], tags={"response_tokens": [100 if stale else 10]}),
            Claimed(claim="x", fence=1, groups=[group]),
            *([] if stale else [StepStarted(step=1, version=0, groups=[group])]),
            Settled(group=group, fates=["dropped:stale" if stale else "trained"]),
        ]
    for group in range(groups, groups + cancelled):
        out.append(Dispatched(group=group, prompt=1001, dataset="d", size=1, collector="c"))
        out.append(Settled(group=group, fates=["dropped:cancelled_stale"]))
    return out


def test_length_bias_is_told_at_the_end_with_the_prompts_that_lost_most() -> None:
    text = "\n".join(final_lines(summary_of(biased(40)), "runs/x"))
    assert "answers of 10.0 tokens on average, of 32.5 generated (ratio 0.31, under rollout.bias_warning 0.9)" in text
    assert "1 of 31 prompts lost over half of their answers to age; the most: prompt 1000 (10 of 10 groups)" in text
    cancelled = "\n".join(final_lines(summary_of(biased(40, cancelled=2)), "runs/x"))
    assert "2 groups were cancelled for age" in cancelled
    assert "2 of 32 prompts lost over half" in cancelled
    assert "warning" not in "\n".join(final_lines(summary_of(EVENTS), "runs/x"))


def test_length_bias_is_shown_while_it_goes_on() -> None:
    ledger, progress = folds(biased(300))
    view = View(
        ledger=ledger, progress=progress, console=Console(file=io.StringIO()), clock=lambda: 0.0, bias_warning=0.9
    )
    assert view.figures()["length bias"] == "ratio 0.31, 1 prompts mostly lost"
    fair = View(ledger=ledger, progress=progress, console=Console(file=io.StringIO()), clock=lambda: 0.0)
    assert "length bias" not in fair.figures()


def test_alarms_are_shown_while_they_are_on_and_in_the_last_words() -> None:
    """FOUND-L5: a run in which nothing is learned says so."""
    events: list[AnyEvent] = []
    for batch in range(10):
        life = group_events(batch, ["masked:over_budget"] * 4, trained=False)
        judged = Judged(group=batch, batch=batch, age=0, dropped=None, by="", masked={})
        total = BatchJudged(batch=batch, judged=1, kept=1, attempts=1, reward_sum=0.0, reward_count=4)
        events += [*life[:-1], judged, total, life[-1], BatchGivenUp(batch=batch)]
    view, _ = view_of(events, [0.0])
    assert view.figures()["alarms"] == "over_budget, empty_batches"
    lines = [line for line in final_lines(summary_of(events), "runs/x") if line.startswith("warning:")]
    assert [line.split(":")[1] for line in lines] == [
        " over_budget, batches 10 to 10",
        " empty_batches, batches 10 to 10",
    ]
    assert "alarms" not in view_of(EVENTS, [0.0])[0].figures()
