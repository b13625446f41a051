"""Who evaluates is restarted like a collector, though it is none."""

from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.engine.aio.virtual_time import run_virtual, virtual_clock
from asyncrl.engine.deployment import EVALUATOR
from asyncrl.engine.errors import ActorDied
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.loop.supervisor import Supervisor
from asyncrl.engine.testing.simulation import simulated_config


class Nodes:
    """A roster and a restarter, of a cluster that has lost a node, or not."""

    def __init__(self, *, lost: bool, starts: bool = True) -> None:
        self._lost = lost
        self._starts = starts
        self.started: list[str] = []

    def has_lost(self, name: str) -> bool:
        return self._lost

    async def restart(self, name: str) -> Any:
        self.started.append(name)
        if not self._starts:
            raise ActorDied(f"{name} died during start", actor=name)
        return name


def supervisor(nodes: Any, restarts: int = 1) -> Supervisor:
    def nothing(_: str) -> None: ...

    parts: Any = SimpleNamespace(
        all=list, remove=nothing, leave=nothing, forget=nothing, groups=None, versions=None, engine_uses=None
    )
    parts.versions = parts.engine_uses = parts
    return Supervisor(
        simulated_config(supervision__restarts=restarts).supervision,
        parts,
        nodes,
        nodes,
        core=parts,
        publisher=parts,
        events=EventLog(clock=virtual_clock, wall=virtual_clock),
    )


@pytest.mark.parametrize(
    ("nodes", "ends"),
    [(Nodes(lost=False), False), (Nodes(lost=True), True), (Nodes(lost=False, starts=False), True)],
    ids=["replaced", "node lost", "cannot be started"],
)
def test_what_evaluates_is_replaced_or_its_death_is_told_and_nobody_waits_for_it(nodes: Nodes, ends: bool) -> None:
    """Of a node that is lost, too; else it would be restarted for ever to whoever asks, and count as a collector."""

    async def main() -> list[str]:
        own = supervisor(nodes)
        died = ActorDied("evaluator died during run", actor=EVALUATOR)
        if not ends:
            await own.replace_evaluator(died)
            assert nodes.started == [EVALUATOR]
        else:
            with pytest.raises(ActorDied, match="evaluator died during"):
                await own.replace_evaluator(died)
        return own.being_restarted

    assert run_virtual(main) == []
