"""The state of judging many groups, in columns: which are open, live, masked or dropped, and why."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.errors import FilterError
from asyncrl.engine.metrics import DROPPED_GROUPS, FILTERS, JUDGED_GROUPS, JUDGING, MASKED_SAMPLES, RESCUED_GROUPS
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.fate import NAN_REWARD, NO_TOKENS
from asyncrl.filters.base import BaseRolloutFilter, GroupView
from asyncrl.filters.columns import ColumnVerdict, Flags, GroupColumns
from asyncrl.filters.verdict import Kind, Verdict

FRONT_END = "front_end"


@dataclass(frozen=True, slots=True)
class Judgement:
    """The chain's verdict on one group. `masked` maps sample index to reason; `live` as in GroupView.

    `rescued` holds the reasons for which later filters cannot drop the group.
    """

    group: GroupMeta
    dropped: str | None
    by: str
    masked: Mapping[int, str]
    live: tuple[int, ...]
    trained: tuple[int, ...]
    rescued: frozenset[str] = frozenset()


@dataclass(slots=True)
class FilterStats:
    """What one filter has done: groups judged, groups dropped and samples masked by reason, and seconds taken.

    `drop_reasons` and `mask_reasons` are in the metrics before they occur.
    """

    judged: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    masked: Counter[str] = field(default_factory=Counter)
    rescued: int = 0
    seconds: float = 0.0
    drop_reasons: set[str] = field(default_factory=set)
    mask_reasons: set[str] = field(default_factory=set)

    def metrics(self, name: str) -> dict[str, float]:
        """Return the counts of filter `name` so far, by metric; a reason goes without the filter's name."""
        kinds = ((DROPPED_GROUPS, self.dropped, self.drop_reasons), (MASKED_SAMPLES, self.masked, self.mask_reasons))
        by_reason = {
            f"{kind}/{reason.removeprefix(f'{name}/')}": float(counts[reason])
            for kind, counts, expected in kinds
            for reason in sorted(expected | counts.keys())
        }
        figures = {
            JUDGED_GROUPS: float(self.judged),
            RESCUED_GROUPS: float(self.rescued),
            JUDGING: round(self.seconds, 6),
        }
        return {f"{FILTERS}/{name}/{figure}": n for figure, n in (figures | by_reason).items()}

    def restore(self, summary: Mapping[str, Any]) -> None:
        """Go on from the counts that `summary` returned."""
        self.judged, self.rescued, self.seconds = summary["judged"], summary["rescued"], summary["seconds"]
        self.dropped, self.masked = Counter(summary["dropped"]), Counter(summary["masked"])

    def summary(self) -> dict[str, Any]:
        """Return the counts as plain values."""
        return {
            "judged": self.judged,
            "dropped": dict(self.dropped),
            "masked": dict(self.masked),
            "rescued": self.rescued,
            "seconds": round(self.seconds, 6),
        }


class Judging:
    """Groups while a chain judges them, in columns. Codes count from 1 into `reasons`; 0 is kept, not masked."""

    def __init__(self, columns: GroupColumns) -> None:
        self.columns = columns
        self.reasons: list[str] = []
        self.by: list[str] = []
        self.dropped: NDArray[np.int16] = np.zeros(columns.n, dtype=np.int16)
        self.masked: NDArray[np.int16] = np.zeros((columns.n, columns.size), dtype=np.int16)
        self._rescued: dict[str, Flags] = {}
        # Samples with a reward and no token to train. Their reward counts only if a filter asks to keep it: an empty
        # response would otherwise make a flat group look mixed.
        self._waiting: Flags = columns.rewarded & ~columns.live
        self._frozen: dict[int, GroupMeta] = {}
        _lock(columns)

    def counts(self) -> dict[str, int]:
        """Return how many groups were dropped, by reason."""
        found = np.bincount(self.dropped, minlength=len(self.reasons) + 1)[1:]
        return {reason: int(n) for reason, n in zip(self.reasons, found, strict=True) if n}

    def judgements(self) -> list[Judgement]:
        """Return one Judgement per group."""
        columns = self.columns
        out = []
        for i, group in enumerate(columns.groups):
            code = int(self.dropped[i])
            masks = {int(j): self.reasons[int(self.masked[i, j]) - 1] for j in np.flatnonzero(self.masked[i])}
            out.append(
                Judgement(
                    group=group,
                    dropped=self.reasons[code - 1] if code else None,
                    by=self.by[code - 1] if code else "",
                    masked=masks,
                    live=_indexes(columns.live[i]),
                    trained=_indexes(columns.trained[i]),
                    rescued=frozenset(reason for reason, flags in self._rescued.items() if flags[i]),
                )
            )
        return out

    def mask_unusable(self, stats: FilterStats) -> None:
        """Mask samples without a finite reward or without a token to train; failed samples have a fate already."""
        columns = self.columns
        for reason, flags in (
            (NAN_REWARD, columns.finished & ~columns.rewarded),
            (NO_TOKENS, self._waiting),
        ):
            if flags.any():
                self.masked[flags] = self._code(reason, FRONT_END)
                stats.masked[reason] += int(flags.sum())

    def carry_on(self, judgements: Sequence[Judgement]) -> None:
        """Start from the judgements of an earlier stage: what was masked and rescued, and which samples are live."""
        live = np.zeros_like(self.columns.live)
        trained = np.zeros_like(self.columns.trained)
        for i, judgement in enumerate(judgements):
            live[i, list(judgement.live)] = True
            trained[i, list(judgement.trained)] = True
            for sample, reason in judgement.masked.items():
                self.masked[i, sample] = self._code(reason, "")
            self._rescue(i, judgement.rescued)
        self.columns.live, self.columns.trained = live, trained
        _lock(self.columns)

    def drop(self, reason: str, by: str, flags: Flags, stats: FilterStats, *, liftable: bool = True) -> None:
        """Drop the open groups in `flags`; if `liftable`, without those that were rescued from this reason."""
        hit = flags & self.columns.open
        if liftable:
            for name in {reason, reason.rpartition("/")[2]} & set(self._rescued):
                hit &= ~self._rescued[name]
        if not hit.any():
            return
        self.dropped[hit] = self._code(reason, by)
        stats.dropped[reason] += int(hit.sum())
        self.columns.open = self.columns.open & ~hit
        _lock(self.columns)

    def mask(self, reason: str, by: str, flags: Flags, *, keep_reward: bool, stats: FilterStats) -> None:
        """Mask the samples in `flags` that open groups would train.

        Without `keep_reward` they are no longer live. With it, a sample that has a reward and no token to train
        becomes live.
        """
        columns = self.columns
        flags = flags & columns.open[:, None]
        gone = flags & columns.trained
        if gone.any():
            self.masked[gone] = self._code(reason, by)
            stats.masked[reason] += int(gone.sum())
            columns.trained = columns.trained & ~gone
        columns.live = columns.live | (flags & self._waiting) if keep_reward else columns.live & ~flags
        self._waiting = self._waiting & ~flags
        _lock(columns)

    def apply_columns(self, name: str, verdict: ColumnVerdict, stats: FilterStats) -> None:
        for reason, (flags, keep_reward) in verdict.masks.items():
            self.mask(namespaced(name, reason), name, flags, keep_reward=keep_reward, stats=stats)
        for reason, flags in verdict.drops.items():
            self.drop(namespaced(name, reason), name, flags, stats)

    def open_views(self) -> dict[int, GroupView]:
        """Return views of the open groups, by position."""
        columns = self.columns
        return {
            int(i): GroupView(self._freeze(int(i)), _indexes(columns.live[i]), _indexes(columns.trained[i]))
            for i in np.flatnonzero(columns.open)
        }

    def apply(
        self, filter_: BaseRolloutFilter, views: Mapping[int, GroupView], verdicts: list[Verdict], stats: FilterStats
    ) -> None:
        """Check a filter's verdicts on single groups and apply them."""
        _check_verdicts(filter_, list(views.values()), verdicts)
        n, size = self.columns.n, self.columns.size
        drops: dict[str, Flags] = {}
        masks: dict[tuple[str, bool], Flags] = {}
        for i, verdict in zip(views, verdicts, strict=True):
            if verdict.kind is Kind.DROP:
                drops.setdefault(verdict.reason, np.zeros(n, dtype=np.bool_))[i] = True
            elif verdict.kind is Kind.MASK:
                key = (verdict.reason, verdict.keep_reward)
                masks.setdefault(key, np.zeros((n, size), dtype=np.bool_))[i, list(verdict.samples)] = True
            elif verdict.kind is Kind.RESCUE:
                stats.rescued += 1
                self._rescue(i, verdict.rescued)
        for (reason, keep_reward), flags in masks.items():
            self.mask(namespaced(filter_.name, reason), filter_.name, flags, keep_reward=keep_reward, stats=stats)
        for reason, flags in drops.items():
            self.drop(namespaced(filter_.name, reason), filter_.name, flags, stats)

    def _rescue(self, i: int, reasons: Iterable[str]) -> None:
        for reason in reasons:
            self._rescued.setdefault(reason, np.zeros(self.columns.n, dtype=np.bool_))[i] = True

    def _code(self, reason: str, by: str) -> int:
        for code, known in enumerate(zip(self.reasons, self.by, strict=True), start=1):
            if known == (reason, by):
                return code
        self.reasons.append(reason)
        self.by.append(by)
        return len(self.reasons)

    def _freeze(self, i: int) -> GroupMeta:
        if i not in self._frozen:
            group = self.columns.groups[i]
            tags = {name: tuple(v) if isinstance(v, list) else v for name, v in group.tags.items()}
            self._frozen[i] = GroupMeta(group.keys, MappingProxyType(tags))
        return self._frozen[i]


def _lock(columns: GroupColumns) -> None:
    """Make the flags read-only, so that a filter that writes to them raises."""
    for flags in (columns.open, columns.live, columns.trained):
        flags.flags.writeable = False


def _indexes(flags: NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(i for i, flag in enumerate(flags.tolist()) if flag)


def namespaced(name: str, reason: str) -> str:
    """Return a reason as counts and logs write it: `zero_std` of zero_std stays, else `length/too_long`."""
    return reason if reason == name else f"{name}/{reason}"


def check_column_verdict(filter_: BaseRolloutFilter, verdict: Any, columns: GroupColumns) -> None:
    if not isinstance(verdict, ColumnVerdict):
        raise FilterError(f"filter {filter_.name} returned {verdict!r}; judge_columns must return a ColumnVerdict")
    shapes: list[tuple[str, Flags, tuple[int, ...]]]
    shapes = [(reason, flags, (columns.n,)) for reason, flags in verdict.drops.items()]
    shapes += [(reason, flags, (columns.n, columns.size)) for reason, (flags, _) in verdict.masks.items()]
    for reason, flags, shape in shapes:
        if not (reason and isinstance(reason, str)):
            raise FilterError(f"filter {filter_.name} gave the reason {reason!r}; a reason is a non-empty string")
        if flags.shape != shape or flags.dtype != np.bool_:
            raise FilterError(
                f"filter {filter_.name} returned {flags.dtype} of shape {flags.shape} for {reason!r}; "
                f"it must be bool of shape {shape}, one per group or sample"
            )


def _check_verdicts(filter_: BaseRolloutFilter, views: Sequence[GroupView], verdicts: Sequence[Any]) -> None:
    if len(verdicts) != len(views):
        raise FilterError(
            f"filter {filter_.name} gave {len(verdicts)} verdicts for {len(views)} groups; "
            "it must return one per group, in order"
        )
    for view, verdict in zip(views, verdicts, strict=True):
        if not isinstance(verdict, Verdict):
            raise FilterError(
                f"filter {filter_.name} returned {verdict!r} for {view.meta.row}; "
                "it must return keep(), drop(reason), mask(...) or rescue(reasons)"
            )
        if any(not isinstance(i, int) or not 0 <= i < view.size for i in verdict.samples):
            raise FilterError(f"filter {filter_.name} masked samples {verdict.samples} of a group of {view.size}")
        if verdict.kind in (Kind.DROP, Kind.MASK) and not (verdict.reason and isinstance(verdict.reason, str)):
            raise FilterError(
                f"filter {filter_.name} gave the reason {verdict.reason!r} to {verdict.kind} {view.meta.row}; "
                "a reason is a non-empty string, which counts and logs show"
            )
