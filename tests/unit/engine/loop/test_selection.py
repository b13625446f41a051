"""What of a batch is trained: over budget, advantages by group, all from tags."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.engine.errors import AsyncRLError
from asyncrl.engine.loop.selection import Selection, select
from asyncrl.engine.records.fate import OVER_BUDGET, STALE
from asyncrl.engine.testing.fakes import fake_group
from asyncrl.engine.testing.simulation import simulated_config
from asyncrl.filters import Chain, FilterContext
from asyncrl.filters.judging import Judgement


def judged(group: int, rewards: Sequence[float], responses: Sequence[int]) -> Judgement:
    tags: dict[str, Any] = {"response_tokens": list(responses), "trainable_tokens": list(responses)}
    meta = fake_group(group, rewards, **tags)
    (judgement,) = Chain([], min_live=2).judge([meta], FilterContext(trainer_version=0, step=0, seed=0))
    return judgement


def selected(kept: Sequence[Judgement], **values: Any) -> Selection:
    config = simulated_config(**{"rollout__max_new_tokens": 19, "trainer__micro_batch_tokens": 20, **values})
    return select(kept, config, trainer_version=0)


def of(selection: Selection, field: str) -> dict[str, Any]:
    return {key: getattr(sample, field) for key, sample in selection.samples.items()}


def test_a_sample_over_the_budget_is_masked_alone_and_its_reward_counts() -> None:
    """D4: prompts of 2 tokens; lengths [5, 21, 5, 20] and a budget of 20: one is masked, its siblings train."""
    selection = selected([judged(0, [0.0, 1.0, 0.0, 1.0], [3, 19, 3, 18])])
    assert selection.masks == {0: {1: OVER_BUDGET}}
    assert selection.lengths == {"v0_p0_g0": 5, "v0_p0_g2": 5, "v0_p0_g3": 20}
    assert of(selection, "advantage") == pytest.approx({"v0_p0_g0": -1.0, "v0_p0_g2": -1.0, "v0_p0_g3": 1.0})
    assert selection.reward_sum == 1.0


def test_a_sample_over_the_budget_ends_the_run_where_it_must_not_be_masked() -> None:
    """D4: the error names key, length and budget, before any rank starts."""
    kept = [judged(0, [0.0, 1.0], [3, 19])]
    with pytest.raises(AsyncRLError, match=r"v0_p0_g1 has 21 tokens, over trainer\.micro_batch_tokens 20"):
        selected(kept, trainer__over_budget="error")


def test_the_budget_holds_whole_multiples_of_the_alignment() -> None:
    """D4: of 20 tokens 16 are of use in multiples of 8, so a sample of 17 has no place, and the error says why."""
    kept = [judged(0, [0.0, 1.0, 0.0], [14, 15, 3])]
    options = {"trainer__align": 8, "rollout__max_new_tokens": 15}
    assert selected(kept, **options).masks == {0: {1: OVER_BUDGET}}
    with pytest.raises(AsyncRLError, match=r"17 tokens, over .* 20 in multiples of trainer\.align 8; raise it"):
        selected(kept, trainer__over_budget="error", **options)


def test_a_truncated_sample_costs_what_it_has() -> None:
    """D4: 4 tokens, whatever the longest response may be."""
    assert selected([judged(0, [0.0, 1.0], [2, 2])]).lengths == {"v0_p0_g0": 4, "v0_p0_g1": 4}


def test_advantages_go_by_group_whatever_the_order_of_groups() -> None:
    """D16: two groups of four, either first."""
    one, two = judged(0, [0, 0, 0, 1], [2] * 4), judged(1, [5, 9, 9, 9], [2] * 4)
    assert of(selected([one, two]), "advantage") == of(selected([two, one]), "advantage")
    assert selected([one, two]).samples["v0_p1_g0"].advantage == pytest.approx(-(3**0.5))


def test_a_masked_sample_whose_reward_is_kept_counts_in_its_siblings_baseline() -> None:
    kept = replace(judged(0, [0.0, 0.0, 3.0], [2, 2, 2]), masked={2: "overlong"}, trained=(0, 1))
    chosen = selected([kept], trainer__advantage_scale="none")
    assert of(chosen, "advantage") == pytest.approx({"v0_p0_g0": -1.0, "v0_p0_g1": -1.0})
    assert chosen.masks == {0: {2: "overlong"}}


def test_in_mode_tokens_the_last_token_within_the_bound_is_trained_and_a_sample_without_one_is_masked() -> None:
    """At version 3 and bound 1: tokens of versions 0 and 1 are withheld, also beside a sample masked before."""
    spans = ["0:0,2:1", "0:0,1:1", "1:0,3:1", "2:0"]
    meta = fake_group(0, [0.0, 1.0, 0.0, 1.0], end_version=3, spans=spans)
    (judgement,) = Chain([]).judge([meta], FilterContext(trainer_version=3, step=3, seed=0))
    judgement = replace(judgement, masked={3: "overlong"}, trained=(0, 1, 2))
    config = simulated_config(rollout__stale_mode="tokens", rollout__max_staleness=1)
    chosen = select([judgement], config, trainer_version=3)
    assert chosen.masks == {0: {1: STALE, 3: "overlong"}}
    assert of(chosen, "response_tokens") == {"v0_p0_g0": 1, "v0_p0_g2": 1}
    assert of(chosen, "withheld") == {"v0_p0_g0": 1, "v0_p0_g2": 1}
    assert chosen.ages == {"v0_p0_g0": 1, "v0_p0_g2": 0}


def test_in_mode_tokens_withheld_places_count_only_what_was_generated() -> None:
    """Responses of 9 tokens, of version 0 up to 5: tool output at 2 to 4; in the last sample behind it, too."""
    meta = fake_group(
        0,
        [0.0, 1.0, 0.0],
        end_version=3,
        response_tokens=[9, 9, 9],
        trainable_tokens=[6, 9, 2],
        spans=["0:0,2:5"] * 3,
        generated=["0:2,5:9", "", "0:2"],
    )
    (judgement,) = Chain([]).judge([meta], FilterContext(trainer_version=3, step=3, seed=0))
    config = simulated_config(rollout__stale_mode="tokens", rollout__max_staleness=1)
    chosen = select([judgement], config, trainer_version=3)
    assert of(chosen, "response_tokens") == {"v0_p0_g0": 4, "v0_p0_g1": 4}
    assert of(chosen, "withheld") == {"v0_p0_g0": 5, "v0_p0_g1": 5}
    assert of(chosen, "generated") == {"v0_p0_g0": "0:2,5:9", "v0_p0_g1": ""}
    assert chosen.masks == {0: {2: STALE}}
