"""The groups of a checkpoint that never came back, because the run that goes on from it failed before they could.

Invariant: a log that has its end has a fate for every group, also where `resumed` voided the fates that they had.
"""

from asyncrl.engine.events.ledger import Ledger
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.types import Settled
from asyncrl.engine.loop.saved import Saved
from asyncrl.engine.loop.settlement import drop_fates
from asyncrl.engine.records.fate import RUN_ENDED, dropped


def settle_unrestored(saved: Saved, ledger: Ledger, events: EventLog) -> None:
    """Log `run_ended`, as the end of a run does, for the groups of `saved` that have no fate by `ledger`.

    Groups that the controller took up are not among them: it settles them itself.
    """
    unsettled = set(ledger.unsettled)
    for state in saved.state.core.groups:
        if state.grant.group in unsettled:
            flies = state.place == "in_flight"
            fates = [dropped(RUN_ENDED)] * state.grant.size if flies else [*drop_fates(state.meta, RUN_ENDED)]
            events.append(Settled(group=state.grant.group, fates=fates))
