"""The ordered chain of filters: first drop wins, a rescue lifts later drops.

Invariant: a group goes in whole and comes out whole, kept or dropped, with every tag as it was;
a filter that tries otherwise is named in the error. A group left with fewer than `min_live`
live samples is dropped (reason `few_live`).

Reasons are namespaced: a filter's own name as reason stays as it is (`zero_std`), any other is
written `<filter>/<reason>`. Reasons without a filter (`stale`, `few_live`, …) are the front end's.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.errors import FilterError, TagError
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.fate import FEW_LIVE, NAN_REWARD, NO_TOKENS
from asyncrl.filters.base import AFTER_LOGPROBS, CLAIM, BaseRolloutFilter, FilterContext, GroupView
from asyncrl.filters.columns import ColumnVerdict, Flags, GroupColumns
from asyncrl.filters.dynamic_sampling import DynamicSampling, Refill
from asyncrl.filters.taggers import Tagger
from asyncrl.filters.verdict import Kind, Verdict

FRONT_END = "front_end"


@dataclass(frozen=True, slots=True)
class Judgement:
    """The chain's word on one group. `masked` maps sample index to reason; `live` as in GroupView."""

    group: GroupMeta
    dropped: str | None
    by: str
    masked: Mapping[int, str]
    live: tuple[int, ...]
    trained: tuple[int, ...]


@dataclass(slots=True)
class FilterStats:
    """What one filter has done: groups judged and dropped, samples masked, by reason; seconds taken."""

    judged: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    masked: Counter[str] = field(default_factory=Counter)
    rescued: int = 0
    seconds: float = 0.0


class Chain:
    """Filters in the user's order. It handles whole groups and never reorders them."""

    def __init__(
        self,
        filters: Iterable[BaseRolloutFilter],
        *,
        min_live: int = 2,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.filters = tuple(filters)
        self._min_live = min_live
        self._clock = clock or (lambda: 0.0)
        self.stats = {name: FilterStats() for name in (FRONT_END, *(f.name for f in self.filters))}

    @property
    def refill(self) -> Refill | None:
        """The refill that a `dynamic_sampling` in the chain asks for, if any."""
        return next((f.refill for f in self.filters if isinstance(f, DynamicSampling)), None)

    @property
    def taggers(self) -> dict[str, Tagger]:
        """All taggers that the filters ask the collector to run, by tag."""
        return {tag: tagger for filter_ in self.filters for tag, tagger in filter_.taggers.items()}

    @property
    def needs_logprobs(self) -> bool:
        """Whether any filter judges after log-probabilities."""
        return any(filter_.stage == AFTER_LOGPROBS for filter_ in self.filters)

    def judge_after_logprobs(self, judgements: Sequence[Judgement], context: FilterContext) -> list[Judgement]:
        """Judge kept groups, now with the tags of that stage, on top of what was said at the claim."""
        out: list[Judgement] = []
        for _, run in groupby(judgements, key=lambda judgement: judgement.group.size):
            before = list(run)
            groups = [judgement.group for judgement in before]
            self._check_required(groups, AFTER_LOGPROBS)
            verdicts = Verdicts(GroupColumns(groups))
            verdicts.carry_on(before)
            out += self._ask_all(verdicts, context, AFTER_LOGPROBS).judgements()
        return out

    def judge(self, groups: Sequence[GroupMeta], context: FilterContext) -> list[Judgement]:
        """Judge groups in order; TagError or FilterError if tags or a filter break the contract."""
        runs = (list(run) for _, run in groupby(groups, key=lambda group: group.size))
        return [judgement for run in runs for judgement in self.judge_columns(run, context).judgements()]

    def judge_columns(self, groups: Sequence[GroupMeta], context: FilterContext) -> "Verdicts":
        """Judge groups of one size; like `judge`, with the answer in columns."""
        self._check_required(groups, CLAIM)
        verdicts = Verdicts(GroupColumns(groups))
        verdicts.mask_unusable(self.stats[FRONT_END])
        self._drop_few_live(verdicts)
        return self._ask_all(verdicts, context, CLAIM)

    def _ask_all(self, verdicts: "Verdicts", context: FilterContext, stage: str) -> "Verdicts":
        """Ask the filters of a stage, in order, of what is still open."""
        for filter_ in self.filters:
            if filter_.stage != stage:
                continue
            columns = verdicts.columns
            if not columns.open.any():
                break
            stats = self.stats[filter_.name]
            stats.judged += int(columns.open.sum())
            start = self._clock()
            try:
                if filter_.judges_columns:
                    answer = filter_.judge_columns(columns, context)
                    _check_column_verdict(filter_, answer, columns)
                    verdicts.apply_columns(filter_.name, answer, stats)
                else:
                    views = verdicts.open_views()
                    verdicts.apply(filter_, views, list(filter_.judge_many(tuple(views.values()), context)), stats)
            except TagError as error:
                raise TagError(f"filter {filter_.name}: {error}") from error
            except FilterError:
                raise
            except Exception as error:  # A user's code: its own error, with the filter's name.
                if isinstance(error, TypeError | ValueError) and any(s in str(error) for s in _READ_ONLY):
                    raise FilterError(f"filter {filter_.name} tried to change a tag: {error}") from error
                error.add_note(f"raised by filter {filter_.name}")
                raise
            stats.seconds += self._clock() - start
            self._drop_few_live(verdicts)
        return verdicts

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the state of every filter by its place in the chain and its name."""
        return {f"{i}:{f.name}": f.state_dict() for i, f in enumerate(self.filters)}

    def load_state_dict(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore filters; FilterError if the chain is not the one that was saved."""
        mine = [f"{i}:{f.name}" for i, f in enumerate(self.filters)]
        if sorted(states) != sorted(mine):
            raise FilterError(f"the saved chain is {sorted(states)}, this one is {sorted(mine)}")
        for name, filter_ in zip(mine, self.filters, strict=True):
            filter_.load_state_dict(states[name])

    def _check_required(self, groups: Sequence[GroupMeta], stage: str) -> None:
        for filter_ in self.filters:
            for tag in filter_.requires if filter_.stage == stage else ():
                lacking = next((group for group in groups if tag not in group.tags), None)
                if lacking is not None:
                    raise TagError(
                        f"filter {filter_.name} needs tag {tag!r}, which {lacking.keys[0]} lacks; "
                        f"it has {sorted(lacking.tags)}"
                    )

    def _drop_few_live(self, verdicts: "Verdicts") -> None:
        few = verdicts.columns.live.sum(axis=1) < self._min_live
        verdicts.drop(FEW_LIVE, FRONT_END, few, self.stats[FRONT_END])


# What Python and NumPy say when somebody writes to what a filter was given.
_READ_ONLY = ("mappingproxy", "read-only", "does not support item assignment")


class Verdicts:
    """The state of a judgement in columns. Codes count from 1 into `reasons`; 0 is kept, not masked."""

    def __init__(self, columns: GroupColumns) -> None:
        self.columns = columns
        self.reasons: list[str] = []
        self.by: list[str] = []
        self.dropped: NDArray[np.int16] = np.zeros(columns.n, dtype=np.int16)
        self.masked: NDArray[np.int16] = np.zeros((columns.n, columns.size), dtype=np.int16)
        self._rescued: dict[str, Flags] = {}
        self._frozen: dict[int, GroupMeta] = {}
        _lock(columns)

    def counts(self) -> dict[str, int]:
        """Return how many groups were dropped, by reason."""
        found = np.bincount(self.dropped, minlength=len(self.reasons) + 1)[1:]
        return {reason: int(n) for reason, n in zip(self.reasons, found, strict=True) if n}

    def judgements(self) -> list[Judgement]:
        """Return one Judgement a group."""
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
                )
            )
        return out

    def mask_unusable(self, stats: FilterStats) -> None:
        """Mask samples without a usable reward or without tokens to train; failed ones have their fate."""
        columns = self.columns
        for reason, flags in (
            (NAN_REWARD, columns.finished & ~columns.live),
            (NO_TOKENS, columns.live & ~columns.trained),
        ):
            if flags.any():
                self.masked[flags] = self._code(reason, FRONT_END)
                stats.masked[reason] += int(flags.sum())

    def carry_on(self, judgements: Sequence[Judgement]) -> None:
        """Take over which samples earlier filters masked, and which are live."""
        live = np.zeros_like(self.columns.live)
        trained = np.zeros_like(self.columns.trained)
        for i, judgement in enumerate(judgements):
            live[i, list(judgement.live)] = True
            trained[i, list(judgement.trained)] = True
            for sample, reason in judgement.masked.items():
                self.masked[i, sample] = self._code(reason, "")
        self.columns.live, self.columns.trained = live, trained
        _lock(self.columns)

    def drop(self, reason: str, by: str, flags: Flags, stats: FilterStats) -> None:
        """Drop the open groups in `flags`, but for those rescued from this reason."""
        hit = flags & self.columns.open
        for name in {reason, reason.rpartition("/")[2]} & set(self._rescued):
            hit &= ~self._rescued[name]
        if not hit.any():
            return
        self.dropped[hit] = self._code(reason, by)
        stats.dropped[reason] += int(hit.sum())
        self.columns.open = self.columns.open & ~hit
        _lock(self.columns)

    def mask(self, reason: str, by: str, flags: Flags, *, keep_reward: bool, stats: FilterStats) -> None:
        """Mask the samples in `flags` that open groups would train; without their reward they are not live."""
        columns = self.columns
        flags = flags & columns.open[:, None]
        gone = flags & columns.trained
        if gone.any():
            self.masked[gone] = self._code(reason, by)
            stats.masked[reason] += int(gone.sum())
            columns.trained = columns.trained & ~gone
        if not keep_reward:
            columns.live = columns.live & ~flags
        _lock(columns)

    def apply_columns(self, name: str, verdict: ColumnVerdict, stats: FilterStats) -> None:
        for reason, (flags, keep_reward) in verdict.masks.items():
            self.mask(_namespaced(name, reason), name, flags, keep_reward=keep_reward, stats=stats)
        for reason, flags in verdict.drops.items():
            self.drop(_namespaced(name, reason), name, flags, stats)

    def open_views(self) -> dict[int, GroupView]:
        """Return views of the open groups by their place."""
        columns = self.columns
        return {
            int(i): GroupView(self._freeze(int(i)), _indexes(columns.live[i]), _indexes(columns.trained[i]))
            for i in np.flatnonzero(columns.open)
        }

    def apply(
        self, filter_: BaseRolloutFilter, views: Mapping[int, GroupView], verdicts: list[Verdict], stats: FilterStats
    ) -> None:
        """Take a filter's verdicts on single groups, after checking them."""
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
                for reason in verdict.rescued:
                    self._rescued.setdefault(reason, np.zeros(n, dtype=np.bool_))[i] = True
        for (reason, keep_reward), flags in masks.items():
            self.mask(_namespaced(filter_.name, reason), filter_.name, flags, keep_reward=keep_reward, stats=stats)
        for reason, flags in drops.items():
            self.drop(_namespaced(filter_.name, reason), filter_.name, flags, stats)

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
    """Make the flags read-only, so that a filter that writes to them is caught."""
    for flags in (columns.open, columns.live, columns.trained):
        flags.flags.writeable = False


def _indexes(flags: NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(i for i, flag in enumerate(flags.tolist()) if flag)


def _namespaced(name: str, reason: str) -> str:
    return reason if reason == name else f"{name}/{reason}"


def _check_column_verdict(filter_: BaseRolloutFilter, verdict: Any, columns: GroupColumns) -> None:
    if not isinstance(verdict, ColumnVerdict):
        raise FilterError(f"filter {filter_.name} said {verdict!r}; judge_columns returns a ColumnVerdict")
    shapes: list[tuple[str, Flags, tuple[int, ...]]]
    shapes = [(reason, flags, (columns.n,)) for reason, flags in verdict.drops.items()]
    shapes += [(reason, flags, (columns.n, columns.size)) for reason, (flags, _) in verdict.masks.items()]
    for reason, flags, shape in shapes:
        if not (reason and isinstance(reason, str)):
            raise FilterError(f"filter {filter_.name} gave {reason!r} as reason; a reason is a word")
        if flags.shape != shape or flags.dtype != np.bool_:
            raise FilterError(
                f"filter {filter_.name} answered {reason!r} with {flags.dtype} of shape {flags.shape}; "
                f"it must be bool of shape {shape}, so that no group is dropped, added or split"
            )


def _check_verdicts(filter_: BaseRolloutFilter, views: Sequence[GroupView], verdicts: Sequence[Any]) -> None:
    if len(verdicts) != len(views):
        raise FilterError(
            f"filter {filter_.name} gave {len(verdicts)} verdicts for {len(views)} groups; "
            "it may not drop, add or split groups itself"
        )
    for view, verdict in zip(views, verdicts, strict=True):
        if not isinstance(verdict, Verdict):
            raise FilterError(
                f"filter {filter_.name} said {verdict!r} of {view.meta.row}; "
                "say keep(), drop(reason), mask(...) or rescue(reasons)"
            )
        if any(not isinstance(i, int) or not 0 <= i < view.size for i in verdict.samples):
            raise FilterError(f"filter {filter_.name} masked samples {verdict.samples} of a group of {view.size}")
        if verdict.kind in (Kind.DROP, Kind.MASK) and not (verdict.reason and isinstance(verdict.reason, str)):
            raise FilterError(
                f"filter {filter_.name} gave {verdict.reason!r} as reason to {verdict.kind} {view.meta.row}; "
                "a reason is a word, which counts and logs show"
            )
