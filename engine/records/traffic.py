"""What a client of the data plane has put and read, by the path that the bytes took."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

Path = Literal["memory_near", "memory_far", "store_near", "store_far"]
"""Shared memory or the store, of this node or of another one."""
PATHS: tuple[Path, ...] = get_args(Path)
NEAR = ("memory_near", "store_near")


class Flow(NamedTuple):
    """Bytes, and the seconds that their calls took; calls at the same time count each."""

    bytes: int = 0
    seconds: float = 0.0

    def plus(self, other: "Flow") -> "Flow":
        return Flow(self.bytes + other.bytes, self.seconds + other.seconds)

    def minus(self, earlier: "Flow") -> "Flow":
        return Flow(self.bytes - earlier.bytes, self.seconds - earlier.seconds)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Flows by path; a path that is not there has carried nothing."""

    puts: Mapping[Path, Flow] = field(default_factory=dict)
    gets: Mapping[Path, Flow] = field(default_factory=dict)

    def plus(self, other: "Traffic") -> "Traffic":
        return Traffic(_joined(self.puts, other.puts, Flow.plus), _joined(self.gets, other.gets, Flow.plus))

    def minus(self, earlier: "Traffic") -> "Traffic":
        """Return what came since `earlier`."""
        return Traffic(_joined(self.puts, earlier.puts, Flow.minus), _joined(self.gets, earlier.gets, Flow.minus))


def _joined(
    one: Mapping[Path, Flow], other: Mapping[Path, Flow], how: Callable[[Flow, Flow], Flow]
) -> dict[Path, Flow]:
    return {path: how(one.get(path, Flow()), other.get(path, Flow())) for path in PATHS if path in one or path in other}
