"""Length bias from events fed by hand: over the run, over the last groups, by prompt; and the alarm, once."""

from typing import Any

import pytest

from asyncrl.engine.events.bias_alarm import BiasAlarm
from asyncrl.engine.events.length_bias import WINDOW_GROUPS, LengthBias
from asyncrl.engine.events.types import AnyEvent, BatchJudged, Dispatched, Put, RunStarted, Settled

FRESH, STALE = ["trained", "trained"], ["dropped:stale", "dropped:stale"]


def life(group: int, fates: list[str], lengths: list[int] | None, *, prompt: int = 0) -> list[AnyEvent]:
    """A group from dispatch to fates; without lengths it ended before its put."""
    events: list[AnyEvent] = [Dispatched(group=group, prompt=prompt, dataset="d", size=len(fates), collector="c")]
    if lengths is not None:
        events.append(Put(group=group, keys=[], tags={"response_tokens": lengths, "dataset": "d", "prompt": prompt}))
    return [*events, Settled(group=group, fates=fates)]


def fold(*lives: list[AnyEvent]) -> LengthBias:
    bias = LengthBias()
    for events in lives:
        for event in events:
            bias.apply(event)
    return bias


def test_the_ratio_is_mean_length_let_through_over_mean_length_generated() -> None:
    bias = fold(life(0, FRESH, [2, 4]), life(1, STALE, [10, 20], prompt=7))
    assert bias.ratio == pytest.approx(3 / 9)
    assert bias.wasted_tokens == {"dropped:stale": 30}
    assert bias.lost_tokens == 30
    [worst] = bias.summary()["prompts"]["worst"]
    assert (worst["prompt"], worst["lost_tokens"], worst["groups"]) == (7, 30, 1)


def test_what_filters_drop_is_wasted_but_not_lost_to_age() -> None:
    bias = fold(life(0, ["dropped:zero_std", "masked:overlong"], [2, 4]), life(1, ["masked:stale", "trained"], [5, 1]))
    assert (bias.lost_tokens, bias.prompts.mostly_lost) == (5, 0)
    assert bias.wasted_tokens == {"dropped:zero_std": 2, "masked:overlong": 4, "masked:stale": 5}


def test_what_a_filter_declares_to_be_about_age_is_lost_to_age_and_nothing_else_is() -> None:
    started = RunStarted(schema=3, config={}, software={}, age_reasons=("mine/ancient",))
    dropped = ["dropped:mine/ancient", "dropped:staleness/stale"]
    assert fold([started], life(0, dropped, [2, 4])).lost_tokens == 2
    assert fold(life(0, dropped, [2, 4])).lost_tokens == 4


def test_a_failed_sample_has_no_length_and_does_not_make_its_group_look_fresh() -> None:
    bias = fold(life(0, ["failed:score_error", "dropped:stale"], [0, 10]), life(1, FRESH, [5, 5]))
    assert bias.generated.mean == pytest.approx(20 / 3)
    assert bias.ratio == pytest.approx(0.75)
    assert bias.summary()["prompts"]["worst"][0]["lost_groups"] == 1


def test_what_the_end_of_the_run_caught_counts_nowhere() -> None:
    bias = fold(life(0, ["dropped:run_ended"] * 2, [3, 4]), life(1, ["dropped:run_ended"] * 2, None))
    assert (bias.ratio, bias.generated.samples, bias.summary()["prompts"]["counted"]) == (None, 0, 0)


def test_a_cancelled_group_counts_for_its_prompt_and_makes_the_ratio_unknown() -> None:
    bias = fold(life(0, FRESH, [2, 4]), life(1, ["dropped:cancelled_stale"] * 2, None, prompt=3))
    assert (bias.ratio, bias.cancelled_groups, bias.prompts.mostly_lost) == (None, 1, 1)
    assert bias.summary()["prompts"]["worst"][0]["prompt"] == 3


def many(groups: int, *, stale_every: int = 0, start: int = 0) -> list[AnyEvent]:
    """Groups of length 10, of which every n-th has length 100 and is stale."""
    out: list[AnyEvent] = []
    for group in range(start, start + groups):
        lost = bool(stale_every) and group % stale_every == 0
        out += life(group, STALE if lost else FRESH, [100, 100] if lost else [10, 10], prompt=group)
    return out


def test_the_warning_is_of_the_last_groups_and_goes_when_they_are_fair() -> None:
    bias = fold(many(WINDOW_GROUPS - 1, stale_every=4))
    assert not bias.warns(0.9)
    for event in many(1, start=WINDOW_GROUPS - 1):
        bias.apply(event)
    assert bias.recent_ratio == pytest.approx(10 / 32.5)
    assert (bias.warns(0.9), bias.warns(0.3)) == (True, False)
    for event in many(WINDOW_GROUPS, start=WINDOW_GROUPS):
        bias.apply(event)
    assert bias.recent_ratio == pytest.approx(1.0)
    assert not bias.warns(0.9)
    assert bias.ratio is not None
    assert bias.ratio < 0.9


def test_losing_every_group_or_cancelling_any_warns_whatever_the_ratio() -> None:
    assert fold(many(WINDOW_GROUPS, stale_every=1)).warns(0.0)
    cancelled = life(WINDOW_GROUPS, ["dropped:cancelled_stale"] * 2, None)
    assert fold(many(WINDOW_GROUPS), cancelled).warns(0.0)
    assert not fold(many(WINDOW_GROUPS + 1)).warns(1.0)


def test_the_alarm_is_raised_once_at_the_batch_at_which_it_first_shows() -> None:
    said: list[dict[str, Any]] = []
    bias = LengthBias()
    alarm = BiasAlarm(bias, below=0.9, warn=lambda message, **figures: said.append(figures))
    for number in range(6):
        for event in many(WINDOW_GROUPS // 2, start=number * WINDOW_GROUPS // 2, stale_every=4 if number > 1 else 0):
            bias.apply(event)
            alarm.apply(event)
        alarm.apply(BatchJudged(batch=number, judged=1, kept=1, attempts=1, reward_sum=0.0, reward_count=1))
    [figures] = said
    assert figures["batch"] == 2
    assert figures["recent_ratio"] < figures["bias_warning"] == 0.9
    assert figures["prompts_mostly_lost"] == WINDOW_GROUPS // 8
