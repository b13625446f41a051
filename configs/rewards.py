"""One reward function as the configuration names it: `reward.functions` is a list of such entries."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_OWN = ("name", "weight", "part")


@dataclass(frozen=True, slots=True)
class RewardEntry:
    """`name` is a built-in reward, `module:function` or `file.py:function`; `parameters` are its own.

    The run's reward is the sum of weight times value over all entries; `part` is the name of the value in tags and
    metrics. Example: `{name: my_reward.py:score, weight: 0.5}` has the part `score`.
    """

    name: str
    weight: float
    part: str
    parameters: Mapping[str, Any]

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> "RewardEntry":
        """Read one entry; ValueError if its name, weight or part cannot be one."""
        name, weight = entry.get("name"), entry.get("weight", 1.0)
        if not isinstance(name, str) or not name:
            raise ValueError(f"reward.functions: each entry needs a name, a string; got {dict(entry)}")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ValueError(f"reward.functions: {name} has the weight {weight!r}; it must be a finite number")
        if ":" in name and not all(name.rpartition(":")):
            raise ValueError(f"reward.functions: {name} lacks a part; write it as module:function or file.py:function")
        part = entry.get("part", re.sub(r"\W", "_", name.rpartition(":")[2]))
        if not isinstance(part, str) or not re.fullmatch(r"\w+", part):
            raise ValueError(
                f"reward.functions: {name} has the part {part!r}; it must be a name of letters, digits and underscores"
            )
        parameters = {key: value for key, value in entry.items() if key not in _OWN}
        return cls(name, float(weight), part, parameters)


def reward_entries(entries: Sequence[Mapping[str, Any]]) -> list[RewardEntry]:
    """Read all entries; ValueError if one is not valid, or two have the same part."""
    read = [RewardEntry.of(entry) for entry in entries]
    places: dict[str, RewardEntry] = {}
    for entry in read:
        first = places.setdefault(entry.part, entry)
        if first is not entry:
            raise ValueError(
                f"reward.functions: {first.name} and {entry.name} both have the part {entry.part!r}; "
                "give one of them another `part`"
            )
    return read
