"""V, P and what each generator serves."""

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.engine.aio.virtual_time import run_virtual
from asyncrl.engine.errors import VersionError
from asyncrl.engine.loop.versions import Versions


def advanced(versions: Versions, steps: int) -> Versions:
    for _ in range(steps):
        versions.hand_over()
        versions.advance()
    return versions


def test_published_is_what_every_generator_has_acknowledged() -> None:
    versions = advanced(Versions(["a", "b"]), 3)
    versions.acknowledge("a", 3)
    assert (versions.published, versions.publish_lag) == (0, 3)
    versions.acknowledge("b", 2)
    assert (versions.published, versions.publish_lag) == (2, 1)


def test_a_batch_assembled_during_a_step_is_trained_at_the_next_version() -> None:
    versions = Versions(["a"])
    assert versions.next_batch == 0
    versions.hand_over()
    assert versions.next_batch == 1
    versions.advance()
    assert (versions.trainer, versions.next_batch) == (1, 1)


def test_a_version_that_goes_backwards_is_refused_and_changes_nothing() -> None:
    """CASE-A5: 57, then 1."""
    versions = advanced(Versions(["a"]), 57)
    versions.acknowledge("a", 57)
    with pytest.raises(VersionError, match="serves version 57 and acknowledged 1"):
        versions.acknowledge("a", 1)
    assert versions.published == 57


def test_a_version_that_the_trainer_has_not_reached_is_refused() -> None:
    versions = advanced(Versions(["a"]), 1)
    with pytest.raises(VersionError, match="acknowledged version 2, but the trainer is at 1"):
        versions.acknowledge("a", 2)
    assert versions.published == 0


def test_the_same_acknowledgement_again_is_harmless() -> None:
    versions = advanced(Versions(["a"]), 1)
    versions.acknowledge("a", 1)
    versions.acknowledge("a", 1)
    assert versions.published == 1


def test_published_stays_what_all_serve_whoever_is_last() -> None:
    """Versions may be passed over, and every generator is the last one once."""
    versions = advanced(Versions(["a", "b", "c"]), 9)
    moves = [("a", 4, 0), ("b", 7, 0), ("c", 9, 4), ("a", 9, 7), ("b", 8, 8), ("b", 9, 9)]
    for name, version, published in moves:
        versions.acknowledge(name, version)
        assert versions.published == published == min(versions.served.values())


def test_without_generators_everything_is_published() -> None:
    assert advanced(Versions([]), 3).published == 3


def test_one_that_died_is_not_waited_for_and_its_successor_joins_with_what_is_published() -> None:
    versions = advanced(Versions(["a", "b"]), 3)
    versions.acknowledge("a", 3)
    versions.leave("b")
    assert versions.published == 3
    with pytest.raises(VersionError, match="b joins with version 2, and 3 is published"):
        versions.acknowledge("b", 2)
    versions.acknowledge("b", 3)
    assert (versions.published, versions.served) == (3, {"a": 3, "b": 3})


def test_with_all_dead_what_is_published_goes_on_with_the_publishes() -> None:
    versions = advanced(Versions(["a"]), 2)
    versions.acknowledge("a", 1)
    versions.leave("a")
    assert (versions.published, versions.publish_lag) == (1, 1)
    versions.published_to_nobody(2)
    assert versions.published == 2
    versions.acknowledge("a", 2)
    versions.published_to_nobody(7)
    assert versions.published == 2


@settings(deadline=None, max_examples=50)
@given(st.lists(st.one_of(st.none(), st.tuples(st.sampled_from("abc"), st.integers(-1, 9))), max_size=40))
def test_whatever_is_acknowledged_served_versions_rise_and_stay_at_or_below_v(
    moves: list[tuple[str, int] | None],
) -> None:
    """Invariant 8."""
    versions = Versions("abc")
    for move in moves:
        before, published = dict(versions.served), versions.published
        if move is None:
            advanced(versions, 1)
        else:
            try:
                versions.acknowledge(*move)
            except VersionError:
                assert versions.served == before
        assert all(before[name] <= versions.served[name] <= versions.trainer for name in before)
        assert published <= versions.published == min(versions.served.values())


@pytest.mark.parametrize("act", ["hand_over", "give_up", "advance", "acknowledge"])
def test_every_change_wakes_who_waits_for_it(act: str) -> None:
    async def main() -> None:
        versions = Versions(["a"])
        woken: list[float] = []

        async def wait() -> None:
            await versions.changed.wait_at_most(lambda: len(woken) > 0, 5.0)
            woken.append(anyio.current_time())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.sleep(1.0)
            woken.append(-1.0)
            getattr(versions, act)(*["a", 0] if act == "acknowledge" else [])
        assert woken[1] < 5.0

    run_virtual(main)
