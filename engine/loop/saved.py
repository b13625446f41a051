"""A checkpoint from which a run goes on, and how its rows get back into a data plane.

Invariant: groups that were claimed are claimed again before any other row is there, so that the claim takes exactly
them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.engine.checkpoint.folder import GROUPS, TRAINER
from asyncrl.engine.checkpoint.state import RunState
from asyncrl.engine.errors import CheckpointBroken
from asyncrl.engine.records.columns import COLUMNS

if TYPE_CHECKING:
    from asyncrl.engine.data_plane.base import DataPlane
    from asyncrl.engine.deployment import Deployment


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that was found whole."""

    folder: Path
    state: RunState

    @property
    def version(self) -> int:
        return self.state.core.version

    @property
    def trainer(self) -> str:
        """The folder with the ranks' files."""
        return str(self.folder / TRAINER)

    async def put_rows(self, deployment: "Deployment") -> int:
        """Put the rows of groups back, and claim those that were claimed; return the fencing number of that claim."""
        # Here, because bad input is refused before torch is imported, which takes seconds.
        from asyncrl.engine.data_plane.snapshot import Snapshot
        from asyncrl.engine.deployment import PARTITION

        snapshot, plane = Snapshot.read(self.folder / GROUPS), deployment.plane
        claimed = {state.grant.group for state in self.state.core.groups if state.place == "claimed"}
        await snapshot.put_back(plane, PARTITION, [group for group in snapshot.groups if group.group in claimed])
        fence = await _claim(plane, len(claimed), owner=deployment.owner) if claimed else 0
        await snapshot.put_back(plane, PARTITION, [group for group in snapshot.groups if group.group not in claimed])
        return fence


async def _claim(plane: "DataPlane", count: int, *, owner: str) -> int:
    from asyncrl.engine.deployment import CONSUMER, PARTITION

    claim = await plane.claim(
        PARTITION, CONSUMER, columns=COLUMNS, max_groups=count, owner=owner, claim_id=f"{owner}/restored"
    )
    if len(claim.groups) != count:
        raise CheckpointBroken(f"{count} groups were claimed at the checkpoint, and its rows bring {len(claim.groups)}")
    return claim.fence
