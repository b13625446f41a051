"""The deployment of a run, put together of the parts that a runtime has started."""

from collections.abc import Sequence
from typing import Protocol

from asyncrl.collectors.tasks.prepared import PreparedTask
from asyncrl.configs import RunConfig
from asyncrl.engine.data_plane.base import DataPlane
from asyncrl.engine.deployment import CollectorHandle, Deployment, ModelHolder, RankHandle, StateHolder
from asyncrl.engine.lifecycle.parts import cost_model, run_tokenizer, tokenized


class SavingRank(RankHandle, ModelHolder, StateHolder, Protocol):
    """A rank that can save the model, and its own state."""


def assemble(
    config: RunConfig,
    prepared: PreparedTask,
    *,
    plane: DataPlane,
    collectors: Sequence[CollectorHandle],
    ranks: Sequence[SavingRank],
) -> Deployment:
    """Return what the controller works with: the first rank is the one that saves."""
    cost = cost_model(config)
    return Deployment(
        plane=plane,
        collectors=collectors,
        ranks=ranks,
        prompts=prepared.source,
        examples=tokenized(prepared.examples, run_tokenizer(config)),
        cost=cost.flops if cost else None,
        holder=ranks[0],
        states=ranks,
    )
