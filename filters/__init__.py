"""Filters: what was generated and is not worth a training FLOP goes out here, with a reason."""

from asyncrl.filters.base import BaseRolloutFilter, FilterContext, GroupView
from asyncrl.filters.chain import Chain
from asyncrl.filters.columns import ColumnVerdict, GroupColumns
from asyncrl.filters.judging import Judgement
from asyncrl.filters.load import build_chain, build_filter
from asyncrl.filters.verdict import Kind, Verdict, drop, keep, mask, rescue

__all__ = [
    "BaseRolloutFilter",
    "Chain",
    "ColumnVerdict",
    "FilterContext",
    "GroupColumns",
    "GroupView",
    "Judgement",
    "Kind",
    "Verdict",
    "build_chain",
    "build_filter",
    "drop",
    "keep",
    "mask",
    "rescue",
]
