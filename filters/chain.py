"""The ordered chain of filters: first drop wins, a rescue lifts later drops.

Invariant: a group goes in whole and comes out whole, kept or dropped, with every tag as it was;
a filter that tries otherwise is named in the error. A group left with fewer than `min_live`
live samples is dropped (reason `few_live`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from asyncrl.engine.errors import FilterError, TagError
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.fate import FEW_LIVE, NAN_REWARD, NO_TOKENS
from asyncrl.engine.records.group import FAILED
from asyncrl.filters.base import BaseRolloutFilter, FilterContext, GroupView
from asyncrl.filters.dynamic_sampling import DynamicSampling, Refill
from asyncrl.filters.verdict import Kind, Verdict


@dataclass(frozen=True, slots=True)
class Judgement:
    """The chain's word on one group. `masked` maps sample index to reason; `live` as in GroupView."""

    group: GroupMeta
    dropped: str | None
    by: str
    masked: Mapping[int, str]
    live: tuple[int, ...]
    trained: tuple[int, ...]


class Chain:
    """Filters in the user's order. `judge` handles whole groups and never reorders them."""

    def __init__(
        self,
        filters: Iterable[BaseRolloutFilter],
        *,
        min_live: int = 2,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.filters = tuple(filters)
        self._min_live = min_live
        self._clock = clock
        self.seconds: dict[str, float] = {}

    @property
    def refill(self) -> Refill | None:
        """The refill that a `dynamic_sampling` in the chain asks for, if any."""
        return next((f.refill for f in self.filters if isinstance(f, DynamicSampling)), None)

    def judge(self, groups: Sequence[GroupMeta], context: FilterContext) -> list[Judgement]:
        """Judge groups in order; TagError or FilterError if tags or a filter break the contract."""
        self._check_required(groups)
        states = [_State.of(group) for group in groups]
        self._drop_few_live(states)
        for filter_ in self.filters:
            open_states = [state for state in states if state.dropped is None]
            if not open_states:
                break
            start = self._clock() if self._clock else 0.0
            verdicts = self._ask(filter_, [state.view for state in open_states], context)
            if self._clock:
                self.seconds[filter_.name] = self.seconds.get(filter_.name, 0.0) + self._clock() - start
            for state, verdict in zip(open_states, verdicts, strict=True):
                state.apply(filter_.name, verdict)
            self._drop_few_live(open_states)
        return [state.judgement() for state in states]

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

    def _check_required(self, groups: Sequence[GroupMeta]) -> None:
        for filter_ in self.filters:
            for tag in filter_.requires:
                for group in groups:
                    if tag not in group.tags:
                        raise TagError(
                            f"filter {filter_.name} needs tag {tag!r}, which {group.keys[0]} lacks; "
                            f"it has {sorted(group.tags)}"
                        )

    def _ask(self, filter_: BaseRolloutFilter, views: list[GroupView], context: FilterContext) -> list[Verdict]:
        try:
            verdicts = list(filter_.judge_many(tuple(views), context))
        except TagError as error:
            raise TagError(f"filter {filter_.name}: {error}") from error
        except Exception as error:  # A user's code: its own error, with the filter's name.
            if isinstance(error, TypeError) and "mappingproxy" in str(error):
                raise FilterError(f"filter {filter_.name} tried to change a tag: {error}") from error
            error.add_note(f"raised by filter {filter_.name}")
            raise
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
        return verdicts

    def _drop_few_live(self, states: Iterable["_State"]) -> None:
        for state in states:
            if state.dropped is None and len(state.view.live) < self._min_live:
                state.dropped, state.by = FEW_LIVE, "front_end"


@dataclass(slots=True)
class _State:
    view: GroupView
    masked: dict[int, str]
    rescued: frozenset[str] = frozenset()
    dropped: str | None = None
    by: str = ""

    @classmethod
    def of(cls, group: GroupMeta) -> "_State":
        """Open a group: samples without a usable reward or without tokens to train are masked."""
        view = GroupView.of(group)
        masked = {}
        for i, status in enumerate(group.statuses):
            if status == FAILED:
                continue
            if i not in view.live:
                masked[i] = NAN_REWARD
            elif i not in view.trained:
                masked[i] = NO_TOKENS
        return cls(view, masked)

    def apply(self, name: str, verdict: Verdict) -> None:
        if verdict.kind is Kind.DROP and verdict.reason not in self.rescued:
            self.dropped, self.by = verdict.reason, name
        elif verdict.kind is Kind.RESCUE:
            self.rescued |= verdict.rescued
        elif verdict.kind is Kind.MASK:
            gone = [i for i in verdict.samples if i in self.view.trained]
            self.masked.update(dict.fromkeys(gone, verdict.reason))
            trained = tuple(i for i in self.view.trained if i not in gone)
            live = self.view.live
            if not verdict.keep_reward:
                live = tuple(i for i in live if i not in verdict.samples)
            self.view = replace(self.view, trained=trained, live=live)

    def judgement(self) -> Judgement:
        view = self.view
        return Judgement(view.meta, self.dropped, self.by, self.masked, view.live, view.trained)
