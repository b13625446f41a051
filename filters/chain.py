"""The ordered chain of filters. The first drop decides; a rescue lifts later drops.

Invariant: a group goes in whole and comes out whole, kept or dropped, with unchanged tags. If a filter breaks this,
the error names it. A group with fewer than `min_live` live samples is dropped (reason `few_live`).

Reasons carry the name of their filter: `<filter>/<reason>`, or the reason alone if it is the filter's name
(`zero_std`). Reasons without a filter (`stale`, `few_live`, …) are the front end's.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from asyncrl.engine.errors import FilterError, TagError
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.fate import FEW_LIVE, NAN_REWARD, NO_TOKENS
from asyncrl.filters.base import AFTER_LOGPROBS, CLAIM, BaseRolloutFilter, FilterContext
from asyncrl.filters.builtin.dynamic_sampling import DynamicSampling, Refill
from asyncrl.filters.columns import GroupColumns
from asyncrl.filters.judging import FRONT_END, FilterStats, Judgement, Judging, check_column_verdict, namespaced
from asyncrl.filters.taggers import Tagger

# Words of Python's and NumPy's errors for a write to a read-only value.
_READ_ONLY = ("mappingproxy", "read-only", "does not support item assignment")


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
        self.stats[FRONT_END].drop_reasons |= {FEW_LIVE}
        self.stats[FRONT_END].mask_reasons |= {NAN_REWARD, NO_TOKENS}
        for f in self.filters:
            self.stats[f.name].drop_reasons |= {namespaced(f.name, reason) for reason in f.drop_reasons}
            self.stats[f.name].mask_reasons |= {namespaced(f.name, reason) for reason in f.mask_reasons}

    @property
    def refill(self) -> Refill | None:
        """The refill settings of a `dynamic_sampling` in the chain; None without one."""
        return next((f.refill for f in self.filters if isinstance(f, DynamicSampling)), None)

    def metrics(self) -> dict[str, float]:
        """Return what each filter has done so far, by metric name."""
        return {name: n for filter_, stats in self.stats.items() for name, n in stats.metrics(filter_).items()}

    @property
    def taggers(self) -> dict[str, Tagger]:
        """All taggers of the filters, by tag; the collector runs them."""
        return {
            tag: partial(_tag, filter_.name, tag, tagger)
            for filter_ in self.filters
            for tag, tagger in filter_.taggers.items()
        }

    @property
    def age_reasons(self) -> tuple[str, ...]:
        """The reasons about age that the filters declare, as counts and logs write them."""
        return tuple(dict.fromkeys(namespaced(f.name, reason) for f in self.filters for reason in f.age_reasons))

    @property
    def needs_logprobs(self) -> bool:
        """Whether any filter judges after log-probabilities."""
        return any(filter_.stage == AFTER_LOGPROBS for filter_ in self.filters)

    def judge_after_logprobs(self, judgements: Sequence[Judgement], context: FilterContext) -> list[Judgement]:
        """Judge kept groups, which now have the tags of that stage; `judgements` are those made at the claim."""
        out: list[Judgement] = []
        for _, run in groupby(judgements, key=lambda judgement: judgement.group.size):
            before = list(run)
            groups = [judgement.group for judgement in before]
            self._check_required(groups, AFTER_LOGPROBS)
            judging = Judging(GroupColumns(groups))
            judging.carry_on(before)
            out += self._ask_all(judging, context, AFTER_LOGPROBS).judgements()
        return out

    def judge(self, groups: Sequence[GroupMeta], context: FilterContext) -> list[Judgement]:
        """Judge groups in order; TagError if a tag is missing or wrong, FilterError if a filter breaks the contract."""
        runs = (list(run) for _, run in groupby(groups, key=lambda group: group.size))
        return [judgement for run in runs for judgement in self.judge_columns(run, context).judgements()]

    def judge_columns(self, groups: Sequence[GroupMeta], context: FilterContext) -> Judging:
        """Judge groups of one size, as `judge` does, and return the verdicts in columns."""
        self._check_required(groups, CLAIM)
        judging = Judging(GroupColumns(groups))
        self.stats[FRONT_END].judged += len(groups)
        judging.mask_unusable(self.stats[FRONT_END])
        self._drop_few_live(judging)
        return self._ask_all(judging, context, CLAIM)

    def _ask_all(self, judging: Judging, context: FilterContext, stage: str) -> Judging:
        """Let the filters of a stage judge, in order, the groups that are still open."""
        for filter_ in self.filters:
            if filter_.stage != stage:
                continue
            columns = judging.columns
            if not columns.open.any():
                break
            stats = self.stats[filter_.name]
            stats.judged += int(columns.open.sum())
            start = self._clock()
            try:
                if filter_.judges_columns:
                    answer = filter_.judge_columns(columns, context)
                    check_column_verdict(filter_, answer, columns)
                    judging.apply_columns(filter_.name, answer, stats)
                else:
                    views = judging.open_views()
                    judging.apply(filter_, views, list(filter_.judge_many(tuple(views.values()), context)), stats)
            except TagError as error:
                raise TagError(f"filter {filter_.name}: {error}") from error
            except FilterError:
                raise
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # User code may raise anything; its error gets the filter's name.
                if not isinstance(error, Exception):  # sys.exit would end the process without a summary.
                    raise FilterError(f"filter {filter_.name} raised {error!r}") from error
                if isinstance(error, TypeError | ValueError) and any(s in str(error) for s in _READ_ONLY):
                    raise FilterError(f"filter {filter_.name} tried to change a tag: {error}") from error
                error.add_note(f"raised by filter {filter_.name}")
                raise
            stats.seconds += self._clock() - start
            self._drop_few_live(judging)
        return judging

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return each filter's state by position and name (`0:staleness`); FilterError if one is not plain JSON."""
        return {f"{i}:{f.name}": _state_of(f) for i, f in enumerate(self.filters)}

    def load_state_dict(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore filters; FilterError if it is another chain."""
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

    def _drop_few_live(self, judging: Judging) -> None:
        few = judging.columns.live.sum(axis=1) < self._min_live
        judging.drop(FEW_LIVE, FRONT_END, few, self.stats[FRONT_END], liftable=False)


def _tag(name: str, tag: str, tagger: Tagger, tokens: Sequence[int]) -> Any:
    """Run a tagger; FilterError, with the filter's name, if it raises."""
    try:
        return tagger(tokens)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # User code may raise anything; this runs in the collector.
        raise FilterError(f"filter {name}: its tagger {tag!r} raised {error!r}") from error


def _state_of(filter_: BaseRolloutFilter) -> dict[str, Any]:
    try:
        state = filter_.state_dict()
        json.dumps(state)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # User code may raise anything.
        raise FilterError(
            f"filter {filter_.name}: state_dict must return plain JSON values, but raised {error!r}"
        ) from error
    return state
