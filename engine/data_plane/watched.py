"""A dictionary that says which of its keys changed, so that whoever follows it need not go through all of it."""

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Rows(Protocol):
    """Tags by row name, as a store has them now."""

    def get(self, name: str, /) -> Mapping[str, Any] | None:
        """Return the tags of a row, which may be none yet; None if there is no such row."""

    def take_changed(self) -> Iterable[str]:
        """Return the names that came, went or got other tags since the last call, in the order of their changes."""


class WatchedDict(dict[Key, Value]):
    """A dictionary with one follower. What it holds at first counts as changed."""

    def __init__(self, items: Mapping[Key, Value] | None = None) -> None:
        super().__init__(items or {})
        self._changed: dict[Key, None] = dict.fromkeys(self)

    def take_changed(self) -> Iterable[Key]:
        """Return the keys that were set or removed since the last call, in the order of their first change."""
        changed, self._changed = self._changed, {}
        return changed

    def __setitem__(self, key: Key, value: Value) -> None:
        self._changed[key] = None
        super().__setitem__(key, value)

    def __delitem__(self, key: Key) -> None:
        self._changed[key] = None
        super().__delitem__(key)

    def pop(self, key: Key, *default: Any) -> Any:
        self._changed[key] = None
        return super().pop(key, *default)

    def update(self, *others: Any, **named: Any) -> None:
        for key, value in dict(*others, **named).items():
            self[key] = value

    def setdefault(self, key: Key, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def clear(self) -> None:
        self._changed.update(dict.fromkeys(self))
        super().clear()

    def popitem(self) -> tuple[Key, Value]:
        key, value = super().popitem()
        self._changed[key] = None
        return key, value

    def __ior__(self, other: Any) -> "WatchedDict[Key, Value]":  # type: ignore[override, misc]
        self.update(other)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy has no follower.
        return dict, (dict(self),)
