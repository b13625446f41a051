"""For tests of your own filters: `make_group` makes groups by hand, `check_filter` checks a filter's contract.

from asyncrl.filters.testing import check_filter, make_group

def test_my_filter_keeps_the_contract():
    check_filter(MyFilter)
"""

import copy
import json
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from asyncrl.engine.errors import FilterError, TagError
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.fate import FEW_LIVE, NAN_REWARD, NO_TOKENS
from asyncrl.engine.records.group import FAILED, FINISHED, TRUNCATED
from asyncrl.engine.records.keys import sample_keys
from asyncrl.filters.base import BaseRolloutFilter, FilterContext, GroupView
from asyncrl.filters.chain import Chain
from asyncrl.filters.judging import Judgement, namespaced
from asyncrl.filters.verdict import Verdict

TRAINER_VERSION = 10
_MANY = 2000
_MAX_REASONS = 32
_FRONT_END_REASONS = {FEW_LIVE, NAN_REWARD, NO_TOKENS}


class FilterContractError(AssertionError):
    """A filter broke its contract; the message names the filter and the part."""


def make_group(
    rewards: Sequence[float | None],
    *,
    group: int = 0,
    version: int = TRAINER_VERSION,
    lengths: Sequence[int] | None = None,
    failed: Sequence[int] = (),
    truncated: Sequence[int] = (),
    **tags: Any,
) -> GroupMeta:
    """Make a group as the data plane returns it, with one sample per reward and more tags as keywords.

    `failed` and `truncated` name samples by index; a failed sample has no reward and no tokens.
    """
    size = len(rewards)
    tokens = [0 if i in failed else n for i, n in enumerate(lengths or [8] * size)]
    statuses = [FAILED if i in failed else TRUNCATED if i in truncated else FINISHED for i in range(size)]
    base: dict[str, Any] = {
        "group": group,
        "prompt": group,
        "dataset": "default",
        "version": version,
        "end_version": version,
        "prompt_tokens": 4,
        "response_tokens": tokens,
        "trainable_tokens": tokens,
        "reward": [None if i in failed else reward for i, reward in enumerate(rewards)],
        "status": statuses,
        "cause": ["score_error" if i in failed else None for i in range(size)],
    }
    return GroupMeta(sample_keys(version, group, size), {**base, **tags})


def make_context(trainer_version: int = TRAINER_VERSION, *, step: int = 0, seed: int = 0) -> FilterContext:
    """Make a context for judging groups by hand."""
    return FilterContext(trainer_version=trainer_version, step=step, seed=seed)


def judge(filter_: BaseRolloutFilter, *groups: GroupMeta, context: FilterContext | None = None) -> list[Judgement]:
    """Judge groups with one filter, in a chain as in a run, at the filter's stage."""
    chain, context = Chain([filter_]), context or make_context()
    judgements = chain.judge(groups, context)
    if not chain.needs_logprobs:
        return judgements
    kept = chain.judge_after_logprobs([j for j in judgements if j.dropped is None], context)
    after = {judgement.group.keys: judgement for judgement in kept}
    return [after.get(judgement.group.keys, judgement) for judgement in judgements]


def check_filter(
    make: type[BaseRolloutFilter] | Callable[[], BaseRolloutFilter],
    *,
    tags: Callable[[GroupMeta], dict[str, Any]] = lambda group: {},
) -> None:
    """Run a filter through its contract; FilterContractError names the first part that it breaks.

    `make` is a filter class that needs no parameters, or a function that builds the filter. `tags` returns, for any
    group, the additional tags that the filter reads.
    """
    groups = [_with(group, tags) for group in _sample_groups()]
    _check_declaration(make())
    _check_verdicts(make, groups)
    _check_tags_stay(make, groups)
    _check_determinism(make, groups)
    _check_state(make, groups)
    _check_sizes(make, tags)
    _check_columns(make, groups)
    _check_reasons(make, groups)
    _check_required(make, groups[0])


def _with(group: GroupMeta, tags: Callable[[GroupMeta], dict[str, Any]]) -> GroupMeta:
    return GroupMeta(group.keys, {**group.tags, **_filler_tags(group), **tags(group)})


def _filler_tags(group: GroupMeta) -> dict[str, Any]:
    """Return tags like those of the built-in taggers, so that filters that read them can be checked."""
    return {
        "response_hash": [i % 3 for i in range(group.size)],
        "repetition_4": [0.1 * (i % 8) for i in range(group.size)],
        "log_ratio_max": [1.5 * i for i in range(group.size)],
        "log_ratio_mean": [0.1 * i for i in range(group.size)],
    }


def _sample_groups() -> list[GroupMeta]:
    """Return ordinary and odd groups: flat, mixed, huge rewards, empty and long responses, NaN, None, failed, old."""
    rows: list[dict[str, Any]] = [
        {"rewards": [0.0, 1.0, 0.0, 1.0]},
        {"rewards": [1.0, 1.0, 1.0, 1.0]},
        {"rewards": [0.35, 0.35, 0.35, 0.35], "lengths": [1, 5000, 3, 4]},
        {"rewards": [0.0, math.nan, 1.0, None]},
        {"rewards": [math.inf, 0.0, 1.0, -math.inf]},
        {"rewards": [0.0, 1.0, 1.0, 0.0], "failed": [1], "truncated": [2]},
        {"rewards": [1e9, -1e9, 0.5, 0.25], "lengths": [0, 1, 2, 3]},
        {"rewards": [0.0, 1.0, 0.0, 0.0], "version": TRAINER_VERSION - 3, "dataset": "other"},
        {"rewards": [True, False, True, True], "note": ["a", None, "b", "c"]},
        {"rewards": [0.0, 1.0, 2.0, 3.0], "truncated": [0, 1, 2, 3]},
    ]
    return [make_group(**{"group": i, **row}) for i, row in enumerate(rows)]


def _fail(filter_: BaseRolloutFilter, what: str) -> FilterContractError:
    return FilterContractError(f"filter {filter_.name}: {what}")


def _judged(
    filter_: BaseRolloutFilter, groups: Sequence[GroupMeta], what: str = "must judge any group"
) -> list[tuple[Any, ...]]:
    """Return judgements as plain tuples; FilterContractError, with `what` was checked, if the filter raises."""
    try:
        judgements = judge(filter_, *groups)
    except (FilterError, TagError) as error:
        raise _fail(filter_, str(error)) from error
    except Exception as error:  # User code may raise anything; here that is a finding.
        raise _fail(filter_, f"{what}, but raised {error!r}") from error
    return [(j.dropped, tuple(sorted(j.masked.items())), j.live, j.trained) for j in judgements]


def _check_declaration(filter_: BaseRolloutFilter) -> None:
    if not (isinstance(filter_, BaseRolloutFilter) and isinstance(filter_.name, str) and filter_.name):
        raise FilterContractError(f"{filter_!r} is not a BaseRolloutFilter with a name")
    if not (isinstance(filter_.requires, tuple) and all(isinstance(tag, str) for tag in filter_.requires)):
        raise _fail(filter_, f"requires is {filter_.requires!r}; it must be a tuple of tag names")
    odd = sorted(set(filter_.age_reasons) - {*filter_.drop_reasons, *filter_.mask_reasons})
    if odd:
        raise _fail(filter_, f"age_reasons names {odd}, and neither drop_reasons nor mask_reasons does")


def _check_verdicts(make: Callable[[], BaseRolloutFilter], groups: Sequence[GroupMeta]) -> None:
    """Check that any group gets a valid verdict, alone and with others."""
    for group in groups:
        _judged(make(), [group])
    _judged(make(), groups)


def _check_tags_stay(make: Callable[[], BaseRolloutFilter], groups: Sequence[GroupMeta]) -> None:
    before = copy.deepcopy([dict(group.tags) for group in groups])
    filter_ = make()
    views = [GroupView.of(group) for group in groups if len(GroupView.of(group).live) >= 2]
    try:
        verdicts = list(filter_.judge_many(tuple(views), make_context()))
    except Exception as error:  # User code may raise anything; here that is a finding.
        raise _fail(filter_, f"must judge read-only groups, but raised {error!r}") from error
    if len(verdicts) != len(views):
        raise _fail(filter_, f"gave {len(verdicts)} verdicts for {len(views)} groups")
    if repr(before) != repr([dict(group.tags) for group in groups]):
        raise _fail(filter_, "changed a tag")


def _check_determinism(make: Callable[[], BaseRolloutFilter], groups: Sequence[GroupMeta]) -> None:
    answers = []
    for seed in (1, 2, 3):
        random.seed(seed)
        np.random.seed(seed)
        answers.append(_judged(make(), groups))
    if answers[0] != answers[1] or answers[0] != answers[2]:
        raise _fail(make(), "judged the same groups differently; draw randomness from context.rng(group)")


def _check_state(make: Callable[[], BaseRolloutFilter], groups: Sequence[GroupMeta]) -> None:
    old, new = make(), make()
    _judged(old, groups)
    try:
        saved = json.loads(json.dumps(old.state_dict()))
    except (TypeError, ValueError) as error:
        raise _fail(old, f"state_dict does not go through JSON: {error}") from error
    try:
        new.load_state_dict(saved)
    except Exception as error:  # User code may raise anything; here that is a finding.
        raise _fail(old, f"load_state_dict cannot load what state_dict returned: {error!r}") from error
    if _judged(old, groups) != _judged(new, groups):
        raise _fail(old, "judges differently after its state was saved and loaded; state_dict leaves something out")


def _check_sizes(make: Callable[[], BaseRolloutFilter], tags: Callable[[GroupMeta], dict[str, Any]]) -> None:
    """Check no group, a group of two samples, and thousands of groups."""
    if _judged(make(), []) != []:
        raise _fail(make(), "returned judgements for no groups")
    if list(make().judge_many((), make_context())):
        raise _fail(make(), "judge_many gave verdicts for no groups")
    _judged(make(), [_with(make_group([0.0, 1.0]), tags)])
    many = [
        _with(make_group([0.0, 1.0, i / _MANY, 0.5], group=i, lengths=[1, 2, 3 + i, 7]), tags) for i in range(_MANY)
    ]
    reasons = {dropped for dropped, *_ in _judged(make(), many)}
    if len(reasons) > _MAX_REASONS:
        raise _fail(
            make(), f"gave {len(reasons)} different reasons; give few reasons, because each is counted by itself"
        )


def _check_columns(make: Callable[[], BaseRolloutFilter], groups: Sequence[GroupMeta]) -> None:
    """Check that `judge_columns`, if there is one, gives the same drops, masks and live samples as `judge`."""
    filter_ = make()
    if not filter_.judges_columns:
        return
    pairs = zip(groups, _judged(filter_, groups), _judged(_OneByOne(make()), groups), strict=True)
    for group, by_column, alone in pairs:
        for what, columns, single in zip(("dropped", "masked", "live", "trained"), by_column, alone, strict=True):
            if columns != single:
                raise _fail(
                    filter_, f"judge_columns gives {columns!r} for {group.row} ({what}), judge gives {single!r}"
                )


class _OneByOne(BaseRolloutFilter):
    """Lets another filter judge group by group, without `judge_columns`."""

    def __init__(self, filter_: BaseRolloutFilter) -> None:
        self._filter = filter_
        self.stage = filter_.stage  # type: ignore[misc]
        self.requires = filter_.requires  # type: ignore[misc]

    @property
    def name(self) -> str:
        return self._filter.name

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        return self._filter.judge(group, context)


def _check_reasons(make: Callable[[], BaseRolloutFilter], groups: Sequence[GroupMeta]) -> None:
    """Check that a filter that declares its reasons gives only those."""
    filter_ = make()
    judged = _judged(filter_, groups)
    dropped = {reason for reason, *_ in judged if reason}
    masked = {reason for _, masks, *_ in judged for _, reason in masks}
    for kind, given, declared in (
        ("drop_reasons", dropped, filter_.drop_reasons),
        ("mask_reasons", masked, filter_.mask_reasons),
    ):
        if not (isinstance(declared, tuple) and all(isinstance(reason, str) for reason in declared)):
            raise _fail(filter_, f"{kind} is {declared!r}; it must be a tuple of strings")
        allowed = {namespaced(filter_.name, reason) for reason in declared} | _FRONT_END_REASONS
        if declared and not given <= allowed:
            raise _fail(filter_, f"gave {sorted(given - allowed)}; {kind} is {declared!r}")


def _check_required(make: Callable[[], BaseRolloutFilter], group: GroupMeta) -> None:
    """Check that a missing tag is an error with the names of filter and tag, before anything is dropped."""
    for name in make().requires:
        if name not in group.tags:
            raise _fail(make(), f"requires tag {name!r}, which check_filter does not know; give it with tags=")
        bare = GroupMeta(group.keys, {k: v for k, v in group.tags.items() if k != name})
        try:
            judge(make(), bare)
        except TagError:
            continue
        raise _fail(make(), f"passed a group without its required tag {name!r}")
