"""What the chain tells the metrics: every filter, every declared reason from zero on, and the front end's own."""

from asyncrl.filters import BaseRolloutFilter, Chain, FilterContext, GroupView, Verdict, drop, rescue
from asyncrl.filters.builtin.length import Length, Overlong
from asyncrl.filters.builtin.zero_std import ZeroStd
from asyncrl.filters.testing import make_context, make_group


def test_declared_reasons_are_there_at_zero_before_anything_is_judged() -> None:
    figures = Chain([Length(max_tokens=9), Overlong()]).metrics()
    assert set(figures.values()) == {0.0}
    assert set(figures) == {
        "filters/front_end/judged_groups",
        "filters/front_end/rescued_groups",
        "filters/front_end/judging_s",
        "filters/front_end/dropped_groups/few_live",
        "filters/front_end/masked_samples/nan_reward",
        "filters/front_end/masked_samples/no_trainable_tokens",
        "filters/length/judged_groups",
        "filters/length/rescued_groups",
        "filters/length/judging_s",
        "filters/length/dropped_groups/too_long",
        "filters/length/dropped_groups/too_short",
        "filters/overlong/judged_groups",
        "filters/overlong/rescued_groups",
        "filters/overlong/judging_s",
        "filters/overlong/masked_samples/overlong",
    }


def test_counts_are_of_the_whole_run_and_undeclared_reasons_show_once_they_occur() -> None:
    class Odd(BaseRolloutFilter):
        def judge(self, group: GroupView, context: FilterContext) -> Verdict:
            return drop("odd") if group.group % 2 else rescue(["zero_std"])

    ticks = iter(range(100))
    chain = Chain([Odd(), ZeroStd(), Overlong()], clock=lambda: float(next(ticks)))
    names = set(chain.metrics())
    for _ in range(2):
        chain.judge([make_group([1.0, 1.0], group=i, truncated=[0]) for i in range(3)], make_context())
    figures = chain.metrics()
    assert set(figures) - names == {"filters/Odd/dropped_groups/odd"}
    assert figures["filters/Odd/judged_groups"] == 6
    assert figures["filters/Odd/dropped_groups/odd"] == 2
    assert figures["filters/Odd/rescued_groups"] == 4
    assert figures["filters/Odd/judging_s"] == 2.0
    assert figures["filters/zero_std/dropped_groups/zero_std"] == 0
    assert figures["filters/overlong/masked_samples/overlong"] == 4
