"""Scripts against the real front end, the fixtures of the pytest plugin, and golden traces."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engine.errors import ConfigError, Overdue, TagError
from asyncrl.engine.testing.trace import (
    TraceChanged,
    compare_with_golden,
    fail,
    finish,
    hang,
    play,
    put,
    seeded_delays,
    version,
)
from asyncrl.engine.trace.recording import Recording
from asyncrl.engine.trace.replay import replay
from asyncrl.filters import BaseRolloutFilter, FilterContext, GroupView, Verdict, drop, keep, mask


class ShortOnly(BaseRolloutFilter):
    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        long = [i for i in group.trained if group.lengths[i] > 8]
        if len(long) == group.size:
            return drop("too_long")
        return mask(long, "long", keep_reward=True) if long else keep()


EVERYTHING = [
    put([0, 1]),
    put([1, 1]),
    fail("RuntimeError: out of memory"),
    version(6),
    put([0, 1], version=2),
    hang(),
    put([0, 1], version=4, lengths=[20, 3]),
]


def test_a_script_of_everything_comes_to_the_right_fates() -> None:
    """Group 3 is 4 versions old, over the bound of 2; group 4 hangs until the data ends; group 5 is 2 versions old."""
    played = play(EVERYTHING)
    assert played.verdicts == {0: None, 1: "zero_std", 3: "stale", 5: None}
    assert played.fates == {
        0: ["trained", "trained"],
        1: ["dropped:zero_std"] * 2,
        2: ["failed:generation_error"] * 2,
        3: ["dropped:stale"] * 2,
        4: ["dropped:run_ended"] * 2,
        5: ["trained", "trained"],
    }
    assert played.steps == [[0], [5]]
    assert played.plans[0] == [[["v0_p0_g0", "v0_p0_g1"]]]
    assert played.ledger.unsettled == []
    assert played.error is None


def test_filters_stand_in_for_the_chain_and_see_what_was_put() -> None:
    played = play(EVERYTHING, filters=[ShortOnly()])
    assert played.verdicts[1] is None
    assert played.masked == {5: {0: "ShortOnly/long"}}
    assert played.fates[5] == ["masked:ShortOnly/long", "trained"]


def test_settings_and_sizes_reach_the_front_end() -> None:
    script = [put([0, 1, 0]) for _ in range(5)]
    played = play(script, groups_per_step=2, trainer__ranks=2, max_staleness=0)
    assert [len(step) for step in played.steps] == [2, 2, 1]
    assert all(len(plan) == 2 for plan in played.plans)
    with pytest.raises(ValueError, match=r"groups of \[2, 3\] samples in one script"):
        play([put([0, 1]), put([0, 1, 2])])


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: put([0, 1], lengths=[3]), TagError, "1 values for 2 samples"),
        (lambda: put([0, 1], failed=[2]), ValueError, "failed names sample 2 of a group of 2 samples"),
        (lambda: put([0, 1], note=object()), TagError, "tag 'note' holds object"),
        (lambda: put([0, 1], version=-1), ValueError, "versions begin at 0"),
        (lambda: version(-1), ValueError, "versions begin at 0"),
        (lambda: play(put([0, 1])), TypeError, "a script is a list of entries"),  # type: ignore[arg-type]
        (lambda: play([put([0, 1]), "put"]), TypeError, "entry 1 of the script is 'put'"),  # type: ignore[list-item]
        (lambda: play([put([0, 1])], max_stalenes=1), TypeError, "no setting 'max_stalenes'; it could be max_stale"),
        (lambda: play([put([0, 1])], trainer__rank=1), ConfigError, "did you mean trainer.ranks"),
        (lambda: play([put([0])]), ConfigError, "rollout.group_size"),
    ],
)
def test_what_is_no_script_is_refused_where_it_is_written(
    make: Callable[[], Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=re.escape(says)):
        make()


def test_old_versions_are_stale_at_the_next_step() -> None:
    """CASE-A5: the trainer is at 13 and the collector goes on writing version 12."""
    played = play([version(13), *[put([0, 1], version=12) for _ in range(5)], put([0, 1], version=13)], max_staleness=0)
    assert played.verdicts == {**dict.fromkeys(range(5), "stale"), 5: None}


def test_data_that_ends_early_leaves_the_rest_of_the_script_out() -> None:
    played = play([put([0, 1]), finish(), put([0, 1], seconds=50.0)])
    assert played.verdicts == {0: None}


def test_a_collector_that_hangs_for_longer_than_the_deadline_is_overdue() -> None:
    played = play([put([0, 1]), put([0, 1], seconds=5000.0)], supervision__starve_timeout_s=60.0)
    assert isinstance(played.error, Overdue)
    assert played.fates[0] == ["trained", "trained"]


def test_what_a_filter_raises_is_the_ending() -> None:
    class Broken(BaseRolloutFilter):
        def judge(self, group: GroupView, context: FilterContext) -> Verdict:
            raise LookupError("no such tag")

    played = play([put([0, 1])], filters=[Broken()])
    assert "LookupError: no such tag" in played.ending.reason
    assert played.fates == {0: ["dropped:run_ended"] * 2}


def test_delays_are_of_their_seed() -> None:
    one, same, other = seeded_delays(1), seeded_delays(1), seeded_delays(2)
    assert [one(i) for i in range(20)] == [same(i) for i in range(20)] != [other(i) for i in range(20)]
    many = [seeded_delays(3, mean_s=2.0)(i) for i in range(4000)]
    assert sum(many) / len(many) == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("step_seconds", [0.0, 3.5])
def test_what_a_script_made_replays(step_seconds: float) -> None:
    played = play([put([0, 1], seconds=0.5) for _ in range(9)] + EVERYTHING, step_seconds=lambda step: step_seconds)
    assert replay(Recording(played.events)).difference is None


def test_the_fixture_plays_scripts_and_judges_logs_again(
    collector_trace: Callable[..., Any], golden_log: Callable[[str], Path], tmp_path: Path
) -> None:
    played = collector_trace(EVERYTHING)
    played.write(tmp_path / "run" / "events.jsonl")
    assert collector_trace(tmp_path / "run").verdicts == played.verdicts
    other = collector_trace(tmp_path / "run", filters=[ShortOnly()])
    assert other.masked == {5: {0: "ShortOnly/long"}}
    stricter = collector_trace(str(tmp_path / "run" / "events.jsonl"), rollout__max_staleness=1)
    assert stricter.verdicts[5] == "stale"
    assert collector_trace(golden_log("ray-reverse")).ledger.unsettled == []


def test_the_script_of_everything_is_its_golden_trace(
    collector_trace: Callable[..., Any], golden_trace: Callable[..., None]
) -> None:
    golden_trace(collector_trace(EVERYTHING), "everything")


def test_a_golden_trace_that_changed_is_shown_readably(tmp_path: Path) -> None:
    golden = tmp_path / "traces" / "two.jsonl"
    before = play([put([0, 1]), put([1, 1])])
    with pytest.raises(TraceChanged, match=r"no golden trace two\.jsonl yet; run pytest with --refresh-traces"):
        compare_with_golden(before.events, golden)
    compare_with_golden(before.events, golden, refresh=True)
    compare_with_golden(before.events, golden)
    with pytest.raises(TraceChanged) as caught:
        compare_with_golden(play([put([0, 1]), put([1, 1])], filters=[]).events, golden)
    text = str(caught.value)
    assert "- judged group 1 batch 1" in text
    assert "+ judged group 1 batch 1" in text
    assert "dropped is 'zero_std' in the log, None in the replay" in text
    compare_with_golden(before.events[:-1], golden, refresh=True)
    with pytest.raises(TraceChanged, match=r"- \(nothing\)"):
        compare_with_golden(before.events, golden)


def test_the_plugin_imports_nothing_heavy() -> None:
    code = (
        "import sys, asyncrl.engine.testing.pytest_plugin\n"
        "print([m for m in ('ray', 'torch', 'transfer_queue', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
