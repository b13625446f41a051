"""The dispatcher by itself: what may still come."""

from types import SimpleNamespace
from typing import Any

from asyncrl.engine.loop.balance import Balance
from asyncrl.engine.loop.dispatcher import Dispatcher
from asyncrl.engine.loop.versions import Versions
from asyncrl.engine.records import Grant, Prompt
from asyncrl.engine.testing.simulation import simulated_config


def test_a_prompt_that_is_to_be_issued_again_may_still_come() -> None:
    """The data is at its end and nothing is in flight, but a prompt was lost to age: the last batch waits for it."""
    groups: Any = SimpleNamespace(in_flight={})
    dispatcher = Dispatcher(
        simulated_config(rollout__requeue_tries=1),
        [],
        [],
        groups=groups,
        versions=Versions(()),
        passes_over=lambda prompt: False,
        balance=Balance((), exact=False),
        ended=lambda: False,
    )
    dispatcher._source_done = True
    assert not dispatcher.more_may_come()
    dispatcher.lost_to_age(Grant(0, Prompt(0, "1"), 2, 0))
    assert dispatcher.more_may_come()
