"""Prompts by epoch: each whole, each in its own order, the same for one seed."""

from collections.abc import Iterator
from itertools import islice

import pytest

from asyncrl.engine.loop.prompt_source import Listed, PromptSource, Turn
from asyncrl.engine.loop.retirement import Retirement
from asyncrl.engine.records import Grant, Prompt
from asyncrl.engine.records.fate import COLLECTOR_DIED, NOT_RESTORED, RECALLED, STALE
from asyncrl.engine.testing.simulation import simulated_config

PROMPTS = [Prompt(i, f"{i}") for i in range(12)]


def ids(seed: int, epochs: int | None, count: int | None = None) -> list[int | str]:
    return [prompt.id for prompt in islice(Listed(PROMPTS, seed=seed, epochs=epochs), count)]


def test_each_epoch_is_all_prompts_in_an_order_of_its_own() -> None:
    """CASE-B2."""
    order = ids(0, 3)
    epochs = [order[i : i + 12] for i in range(0, 36, 12)]
    assert len(order) == 36
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_without_a_number_of_epochs_there_is_no_end() -> None:
    assert sorted(ids(0, None, 12 * 50)) == sorted(list(range(12)) * 50)


def test_the_order_is_a_function_of_the_seed() -> None:
    assert ids(1, 2) == ids(1, 2)
    assert ids(1, 2) != ids(2, 2)
    assert ids(1, 3)[:24] == ids(1, 2)


def test_a_list_that_was_restored_goes_on_as_the_undisturbed_one() -> None:
    for drawn in (0, 5, 12, 30):
        whole = Listed(PROMPTS, seed=3, epochs=3)
        before = list(islice(whole, drawn))
        other = Listed(PROMPTS, seed=3, epochs=3)
        other.restore(whole.state())
        assert [*before, *other] == list(Listed(PROMPTS, seed=3, epochs=3))


class Empty(list[Prompt]):
    """No prompts; looking through them again and again is an error instead of a hang."""

    looks = 0

    def __iter__(self) -> Iterator[Prompt]:
        self.looks += 1
        if self.looks > 3:
            pytest.fail("an endless search for a prompt where there is none")
        return super().__iter__()


def test_no_prompts_are_the_end_of_the_data_and_not_an_endless_search() -> None:
    """J2."""
    assert list(Listed(Empty(), seed=0, epochs=None)) == []


def test_a_prompt_that_is_to_be_issued_again_may_still_come() -> None:
    """The data is at its end and nothing is in flight, but a prompt was lost to age: the last batch waits for it."""
    source = PromptSource([], simulated_config(rollout__requeue_tries=1), Retirement(None, prompts=0))
    assert source.next() is None
    assert not source.more
    lost = Grant(0, Prompt(0, "1"), 2, 0)
    source.lost(lost, STALE)
    assert source.more
    assert source.next() == Turn(lost.prompt, tries=1, retry_of=0)
    assert not source.more


def test_a_prompt_comes_again_as_often_as_allowed_and_never_after_the_end() -> None:
    source = PromptSource([], simulated_config(rollout__requeue_tries=1), Retirement(None, prompts=0))
    source.next()
    source.lost(Grant(0, Prompt(0, "1"), 2, 0, tries=1), STALE)
    source.close()
    source.lost(Grant(1, Prompt(0, "1"), 2, 0), STALE)
    source.lost(Grant(1, Prompt(0, "1"), 2, 0), RECALLED)
    assert not source.more
    assert source.next() is None


def test_what_is_lost_while_a_run_ends_comes_again_in_the_next_part_of_it() -> None:
    """The checkpoint at the end holds it; a prompt that is neither in flight nor there would never be judged."""
    config = simulated_config(rollout__requeue_tries=1)
    ending = PromptSource([], config, Retirement(None, prompts=0))
    ending.next()
    ending.close()
    for group, reason in enumerate((STALE, RECALLED, NOT_RESTORED, COLLECTOR_DIED)):
        ending.lost(Grant(group, Prompt(group, "1"), 2, 0), reason)
    resumed = PromptSource([], config, Retirement(None, prompts=0))
    resumed.restore(ending.state())
    turns = [resumed.next() for _ in range(4)]
    assert [turn and (turn.retry_of, turn.tries) for turn in turns] == [(0, 1), (1, 0), (2, 0), (3, 0)]


@pytest.mark.parametrize("tries", [0, 2])
def test_a_recalled_prompt_comes_again_whatever_its_tries_and_keeps_them(tries: int) -> None:
    """FOUND-C3: what a slow collector was granted was not tried."""
    source = PromptSource([], simulated_config(rollout__requeue_tries=tries), Retirement(None, prompts=0))
    source.next()
    source.lost(Grant(7, Prompt(0, "1"), 2, 0, tries), RECALLED)
    assert source.next() == Turn(Prompt(0, "1"), tries=tries, retry_of=7)
