"""What came of the recorded claims: which groups each of them brought to judgement, and in which batch.

Groups that were given back, or whose claim's owner died, before they were judged are another claim's.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from asyncrl.engine.events.types import (
    AnyEvent,
    BatchJudged,
    Claimed,
    ClaimReturned,
    Judged,
    OwnerDead,
    Put,
    Settled,
)
from asyncrl.engine.loop.front_end import LEASE_LOST
from asyncrl.engine.records.fate import dropped
from asyncrl.engine.records.keys import row_of


@dataclass(slots=True)
class JudgedClaim:
    """The groups of one claim that were judged, in the order of the claim."""

    batch: int
    groups: list[int] = field(default_factory=list)


def judged_claims(events: Iterable[AnyEvent]) -> dict[int, JudgedClaim]:
    """Return, by the number of a claim's event, what it brought to judgement; claims that brought nothing are left out.

    Where no verdict followed, since the log broke off or a filter raised, the batch is that then under way.
    """
    found: dict[int, JudgedClaim] = {}
    open_claims: dict[int, int] = {}
    batches = 0
    for event in events:
        match event:
            case Claimed():
                found[event.seq] = JudgedClaim(batches, list(event.groups))
                open_claims.update(dict.fromkeys(event.groups, event.seq))
            case Judged() if event.group in open_claims:
                found[open_claims.pop(event.group)].batch = event.batch
            case ClaimReturned() | OwnerDead():
                for group in open_claims.keys() & set(event.groups):
                    found[open_claims.pop(group)].groups.remove(group)
            case BatchJudged():
                batches = event.batch + 1
    return {seq: claim for seq, claim in found.items() if claim.groups}


def lost_rows(events: Iterable[AnyEvent]) -> frozenset[str]:
    """Return the rows of groups whose claims were lost before hand-off."""
    rows: dict[int, str] = {}
    lost: set[str] = set()
    for event in events:
        match event:
            case Put() if event.keys:
                rows[event.group] = row_of(event.keys[0])
            case Settled() if dropped(LEASE_LOST) in event.fates and event.group in rows:
                lost.add(rows[event.group])
    return frozenset(lost)
