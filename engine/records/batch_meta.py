"""A batch's metadata without its tensors. For checkpoints and for stores between nodes, which do not exist yet.

Invariant: every method is pure, keeps tags and lengths with their key, and returns new containers.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from asyncrl.engine.errors import TagError


@dataclass(frozen=True, slots=True)
class BatchMeta:
    """Keys of one partition with, per key, the sequence length in tokens and the tags."""

    partition: str
    keys: tuple[str, ...]
    lengths: tuple[int, ...]
    tags: tuple[Mapping[str, Any], ...]
    consumer: str = ""
    columns: tuple[str, ...] = ()
    bag: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not len(self.keys) == len(self.lengths) == len(self.tags):
            raise TagError(f"{len(self.keys)} keys, {len(self.lengths)} lengths and {len(self.tags)} tags disagree")
        if len(set(self.keys)) != len(self.keys):
            raise TagError("a key occurs twice in a batch")

    def __len__(self) -> int:
        return len(self.keys)

    def _take(self, positions: Iterable[int]) -> "BatchMeta":
        chosen = list(positions)
        return replace(
            self,
            keys=tuple(self.keys[i] for i in chosen),
            lengths=tuple(self.lengths[i] for i in chosen),
            tags=tuple(copy.deepcopy(dict(self.tags[i])) for i in chosen),
            bag=copy.deepcopy(dict(self.bag)),
        )

    def _positions(self, keys: Iterable[str]) -> list[int]:
        at = {key: i for i, key in enumerate(self.keys)}
        wanted = list(keys)
        missing = [key for key in wanted if key not in at]
        if missing:
            raise TagError(f"keys {missing[:5]} are not in this batch of {len(self)}")
        return [at[key] for key in wanted]

    def subset(self, keys: Sequence[str]) -> "BatchMeta":
        """Return the entries of `keys`, in that order; TagError if a key is unknown."""
        return self._take(self._positions(keys))

    def slice(self, start: int, stop: int) -> "BatchMeta":
        """Return the entries from `start` to `stop` (exclusive), as a Python slice."""
        return self._take(range(*slice(start, stop).indices(len(self))))

    def drop(self, keys: Iterable[str]) -> "BatchMeta":
        """Return all entries except those of `keys`; TagError if a key is unknown."""
        gone = set(self._positions(keys))
        return self._take(i for i in range(len(self)) if i not in gone)

    def stamp(self, tag: str, values: Sequence[Any]) -> "BatchMeta":
        """Return a copy in which entry i has `tag` = `values[i]`; TagError if the lengths differ."""
        if len(values) != len(self):
            raise TagError(f"{len(values)} values of tag {tag!r} for {len(self)} keys")
        fresh = self._take(range(len(self)))
        return replace(
            fresh,
            tags=tuple({**row, tag: value} for row, value in zip(fresh.tags, values, strict=True)),
        )

    @staticmethod
    def concat(parts: Sequence["BatchMeta"]) -> "BatchMeta":
        """Join batches of the same partition, consumer and columns. On equal names in bags, the later one is taken."""
        if not parts:
            raise TagError("nothing to join")
        partitions = {part.partition for part in parts}
        if len(partitions) > 1:
            raise TagError(f"batches of different partitions cannot be joined: {sorted(partitions)}")
        views = {(part.consumer, part.columns) for part in parts}
        if len(views) > 1:
            raise TagError(f"batches of different consumers or columns cannot be joined: {sorted(views)}")
        fresh = [part._take(range(len(part))) for part in parts]
        bag: dict[str, Any] = {}
        for part in fresh:
            bag.update(part.bag)
        return replace(
            fresh[0],
            keys=tuple(key for part in fresh for key in part.keys),
            lengths=tuple(length for part in fresh for length in part.lengths),
            tags=tuple(row for part in fresh for row in part.tags),
            bag=bag,
        )
