"""What the stages make of ranks that measure or train something else than planned."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from asyncrl.engine.aio.virtual_time import run_virtual
from asyncrl.engine.errors import AsyncRLError
from asyncrl.engine.loop.selection import Selection, select
from asyncrl.engine.loop.stages import Stages
from asyncrl.engine.records.work import ForwardWork, RankResult, TrainWork, Update
from asyncrl.engine.testing.fakes import fake_group
from asyncrl.engine.testing.simulation import simulated_config
from asyncrl.filters import Chain, FilterContext

TOKENS = {"v0_p0_g0": 1, "v0_p0_g1": 3, "v0_p0_g2": 5, "v0_p0_g3": 13}


@dataclass
class OddRank:
    """Measures what it was given, without the keys `lacking` and with those of `more`; trains `extra` tokens more.

    `works` are those that it trained.
    """

    lacking: frozenset[str] = frozenset()
    more: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    extra: int = 0
    works: list[TrainWork] = field(default_factory=list)

    async def logprobs(self, work: ForwardWork) -> dict[str, tuple[float, float]]:
        keys = [key for batch in work.micro_batches for key in batch.keys]
        return {key: (0.0, 0.0) for key in [*keys, *self.more] if key not in self.lacking}

    async def train(self, work: TrainWork) -> RankResult:
        self.works.append(work)
        keys = [key for batch in work.micro_batches if not batch.filler for key in batch.keys]
        return RankResult(0.0, 0.0, 0, 0.0, sum(TOKENS[key] for key in keys) + self.extra, 0.0)


def staged(ranks: list[OddRank], body: Callable[[Stages, Selection], Awaitable[Any]], **options: Any) -> Any:
    """Run `body` on the stages over two ranks, and samples of 1, 3, 5 and 13 response tokens."""
    tokens = list(TOKENS.values())
    group = fake_group(0, [0.0, 1.0, 0.0, 1.0], response_tokens=tokens, trainable_tokens=tokens)
    config = simulated_config(trainer__ranks=2, trainer__advantage_scale="none", **options)
    selection = select(Chain([]).judge([group], FilterContext(0, 0, 0)), config, trainer_version=0)

    async def main() -> Any:
        return await body(Stages(config, ranks=ranks, cost=None), selection)  # type: ignore[arg-type]

    return run_virtual(main)


async def measure(stages: Stages, selection: Selection) -> dict[str, tuple[float, float]]:
    return await stages.logprobs(selection, step=1, write=False)


async def train(stages: Stages, selection: Selection) -> list[RankResult]:
    return await stages.train(stages.plan(selection), selection, step=1)


def test_every_sample_is_measured_once_in_the_order_of_the_selection() -> None:
    assert list(staged([OddRank(), OddRank()], measure)) == [f"v0_p0_g{i}" for i in range(4)]


def test_more_ranks_than_samples_measure_each_once_and_no_filler() -> None:
    assert list(staged([OddRank() for _ in range(6)], measure)) == [f"v0_p0_g{i}" for i in range(4)]


def test_a_sample_that_two_ranks_measured_is_an_error_with_its_name() -> None:
    twice = {f"v0_p0_g{i}": (0.0, 0.0) for i in range(4)}
    with pytest.raises(AsyncRLError, match="two ranks measured v0_p0_g"):
        staged([OddRank(more=twice), OddRank(more=twice)], measure)


def test_a_sample_that_no_rank_measured_is_an_error_with_its_name() -> None:
    lacking = frozenset(["v0_p0_g2"])
    with pytest.raises(AsyncRLError, match="the ranks measured 3 of 4 samples; v0_p0_g2 is odd"):
        staged([OddRank(lacking), OddRank(lacking)], measure)


@pytest.mark.parametrize("extra", [-1, 1])
def test_more_or_fewer_tokens_trained_than_planned_are_an_error(extra: int) -> None:
    assert sum(result.tokens for result in staged([OddRank(), OddRank()], train)) == 22
    with pytest.raises(AsyncRLError, match=rf"trained on {22 + extra} tokens; the plan holds 22"):
        staged([OddRank(extra=extra), OddRank()], train)


def test_advantages_carry_the_scale_of_their_own_update_and_their_sign() -> None:
    """sequence_mean: a token counts tokens of the update / (its samples · tokens of the sample)."""
    ranks = [OddRank(), OddRank()]
    options = {"trainer__loss_normalisation": "sequence_mean", "trainer__updates_per_batch": 2}
    staged(ranks, train, **options)
    seen: dict[str, float] = {}
    for number in range(2):
        parts = [rank.works[0].micro_batches[number] for rank in ranks]
        keys = [key for batch in parts if not batch.filler for key in batch.keys]
        total = sum(TOKENS[key] for key in keys)
        assert [rank.works[0].updates[number] for rank in ranks] == [Update(1, total)] * 2
        for rank, batch in zip(ranks, parts, strict=True):
            for key in batch.keys:
                sign = 1 if int(key[-1]) % 2 else -1
                assert rank.works[0].samples[key].advantage == pytest.approx(
                    sign * 0.5 * total / (len(keys) * TOKENS[key])
                )
                seen[key] = rank.works[0].samples[key].advantage
    assert seen.keys() == TOKENS.keys()
