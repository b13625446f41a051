"""Extras: tensors of a partition beside tokens and log-probabilities. Ranks read them for the model.

The model's forward must name each extra. transformers' models ignore keywords that they do not know, so the model
would otherwise be trained on other inputs than were sampled.
"""

import inspect
from collections.abc import Sequence
from typing import Any

from asyncrl.engine.data_plane.base import Partition
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.records.columns import COLUMNS


def extras_of(partition: Partition) -> list[str]:
    """Return the further columns of tensors; columns of other objects do not travel to ranks."""
    return [name for name in partition.tensors if name not in COLUMNS]


def check_takes(model: Any, extras: Sequence[str]) -> None:
    """ConfigError if the model's forward does not name one of the extras."""
    known = inspect.signature(model.forward).parameters
    # A wrapper that hands on whatever it is given does not say what the model inside takes.
    refused = [name for name in extras if name not in known] if "input_ids" in known else []
    if refused:
        raise ConfigError(
            f"the task attaches the extra {refused[0]!r}, which {type(model).__name__}.forward does not take; "
            f"it takes {', '.join(known)}. Name the extra as the model does, or take it out of the task's `extras`"
        )
