"""The event log as a file: every type through and back, torn lines, NaN's written form, order."""

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.engine.errors import TraceError
from asyncrl.engine.events import types
from asyncrl.engine.events.log import EventLog, read_events
from asyncrl.engine.events.types import AnyEvent, Put, RunEnded, unwritten, written
from asyncrl.engine.records.estimates import Estimate
from asyncrl.engine.records.scores import Scores

ONE_OF_EACH: list[AnyEvent] = [
    types.RunStarted(schema=types.SCHEMA, config={"run": {"seed": 1}, "filters": [{"name": "x"}]}, software={"a": "1"}),
    types.Dispatched(group=7, prompt=3, dataset="math", size=4, collector="collector0", retry_of=2),
    types.Span(group=7, version=1, tokens=9),
    types.Finished(group=7, tokens=9, seconds=0.25),
    types.Put(group=7, keys=["v1_p7_g0"], tags={"version": 1, "reward": [0.5], "cause": [None], "text": "ü\n"}),
    types.GroupFailed(group=8, reason="timeout", error='Traceback\n  "x"'),
    types.Claimed(claim="driver/3", fence=9, groups=[7, 8]),
    types.ClaimReturned(groups=[8]),
    types.OwnerDead(owner="driver-2", groups=[9]),
    types.OwnerDead(owner="collector0", groups=[], error="killed", replaced=True),
    types.ActorRestarted(actor="collector0", restart=2, seconds=7.5),
    types.CollectorAdded(collector="collector2"),
    types.CollectorJoined(collector="collector2"),
    types.CollectorLeaving(collector="collector0", seconds=30.0),
    types.CollectorLeft(collector="collector0"),
    types.RanksPlaced(nodes=["10.0.0.1", "10.0.0.2"]),
    types.Judged(group=7, batch=2, age=1, dropped=None, by="", masked={0: "long", 12: "nan_reward"}, digest=2**32 - 1),
    types.Judged(group=8, batch=2, age=3, dropped="stale", by="front_end", masked={}),
    types.BatchJudged(batch=2, judged=2, kept=1, attempts=1, reward_sum=0.1, reward_count=3),
    types.BatchTaken(batch=2),
    types.BatchGivenUp(batch=2),
    types.VersionSet(version=4),
    types.Measured(batch=2, log_ratios={"v1_p7_g0": [0.5, {"float": "nan"}]}),
    types.Planned(batch=2, step=1, ranks=[[["v1_p7_g0"], ["v1_p7_g1"]], [["v1_p7_g2"], []]], fillers=1),
    types.StepStarted(step=1, version=0, groups=[7]),
    types.WorkGiven(step=1, stage="train", parts=[{"advantages": 2**32 - 1}, {}], samples=[[1, 2], []]),
    types.StepEnded(
        step=1,
        version=1,
        seconds=0.25,
        ages={"0": 3, "2": 1},
        samples=4,
        tokens=9,
        reward_sum=1e-9,
        metrics={"train/loss": -0.0},
    ),
    types.PublishStarted(version=1),
    types.PublishFailed(version=1, error="OSError()"),
    types.Acknowledged(generator="collector0", version=1),
    types.Published(version=1, seconds=0.5),
    types.Settled(group=7, fates=["trained", "masked:long", "dropped:stale", "failed:score_error"]),
    types.Released(groups=[7]),
    types.EvaluationStarted(version=4, prompts=2, samples=2),
    types.Evaluated(
        version=4, prompt="a", dataset="d", rewards=[1.0, None], tokens=[3, 0], statuses=["finished", "failed"]
    ),
    types.EvaluationEnded(
        version=4, seconds=0.5, scores=Scores(1, 1, 1, {"1": Estimate(1.0, 0.2, 1.0)}), datasets={"d": Scores(0, 0, 2)}
    ),
    types.EvaluationFailed(version=5, error="Overdue", skipped=True),
    types.Checkpointed(path="checkpoints/4", version=4),
    types.Resumed(checkpoint="checkpoints/4", after=17),
    types.RunEnded(code=130, reason="interrupted", keys_left=0, filters={"zero_std": {"judged": 1}}),
]


class Seen:
    def __init__(self) -> None:
        self.events: list[AnyEvent] = []

    def apply(self, event: AnyEvent) -> None:
        self.events.append(event)


def ticking(start: float, step: float) -> Iterator[float]:
    while True:
        yield start
        start += step


def write(path: Path, events: list[AnyEvent]) -> list[AnyEvent]:
    clock, wall, seen = ticking(100.0, 0.5), ticking(1e9, 1.0), Seen()
    log = EventLog(clock=lambda: next(clock), wall=lambda: next(wall), folds=[seen], path=path)
    for event in events:
        log.append(event)
    log.close()
    return seen.events


def test_every_type_goes_through_the_file_and_back(tmp_path: Path) -> None:
    assert {type(event) for event in ONE_OF_EACH} == set(AnyEvent.__args__)
    path = tmp_path / "events.jsonl"
    seen = write(path, ONE_OF_EACH)
    assert list(read_events(path)) == seen
    assert [type(event) for event in seen] == [type(event) for event in ONE_OF_EACH]
    assert [msgspec.structs.replace(event, seq=0, t=0.0, wall=0.0) for event in seen] == ONE_OF_EACH


def test_each_line_is_one_json_object_with_type_number_and_both_times(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, ONE_OF_EACH)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["seq"] for line in lines] == list(range(1, len(ONE_OF_EACH) + 1))
    assert [line["t"] for line in lines[:3]] == [0.5, 1.0, 1.5]
    assert [line["wall"] for line in lines[:3]] == [1e9, 1e9 + 1, 1e9 + 2]
    assert lines[1]["type"] == "dispatched"


def test_a_torn_last_line_is_passed_over_wherever_it_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    seen = write(path, ONE_OF_EACH[:3])
    whole = path.read_bytes()
    start_of_last = whole[:-1].rindex(b"\n") + 1
    for end in range(start_of_last, len(whole)):
        path.write_bytes(whole[:end])
        assert list(read_events(path)) == seen[:2]


def test_a_bad_line_in_the_middle_raises(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, ONE_OF_EACH[:3])
    lines = path.read_bytes().splitlines(keepends=True)
    for bad in (b'{"type": "put"}\n', b'{"type": "unheard_of"}\n', lines[1][:20] + b"\n"):
        path.write_bytes(lines[0] + bad + lines[2])
        with pytest.raises(TraceError):
            list(read_events(path))


def test_a_bad_line_is_named_by_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, ONE_OF_EACH[:3])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b'{"type": "put"}\n' + lines[2])
    with pytest.raises(TraceError, match=r"events\.jsonl, line 2: .*group"):
        list(read_events(path))


def test_a_log_of_a_newer_schema_is_refused_with_both_numbers(tmp_path: Path) -> None:
    """Also where the newer run_started no longer has what this one needs."""
    path = tmp_path / "events.jsonl"
    newer = types.SCHEMA + 1
    for line in (
        msgspec.json.encode(types.RunStarted(schema=newer, config={}, software={})),
        b'{"type":"run_started","schema":%d}' % newer,
    ):
        path.write_bytes(line + b"\n")
        with pytest.raises(TraceError, match=f"schema {newer}, and this asyncrl reads up to {types.SCHEMA}"):
            list(read_events(path))


def test_the_digest_of_tags_is_of_their_values_and_not_of_their_order() -> None:
    tags = {"reward": [0.0, math.nan, None], "version": 3}
    assert types.digest(tags) == types.digest(dict(reversed(tags.items())))
    for other in (
        {**tags, "version": 4},
        {**tags, "reward": [0.0, None, None]},
        {**tags, "reward": [0.0, math.inf, None]},
    ):
        assert types.digest(other) != types.digest(tags)
    assert types.digest(tags) == types.digest_written(written(tags))


def test_the_thread_brings_events_to_the_file_soon_without_being_asked(tmp_path: Path) -> None:
    """So a process that is killed in the middle of a long step loses a fifth of a second."""
    path = tmp_path / "events.jsonl"
    log = EventLog(clock=lambda: 0.0, wall=lambda: 0.0, path=path, threaded=True)
    log.append(RunEnded(code=0, reason="done"))
    deadline = time.monotonic() + 20
    while not path.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert path.read_bytes().count(b"\n") == 1
    log.close()


def test_flush_brings_events_to_the_file_before_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(clock=lambda: 0.0, wall=lambda: 0.0, path=path)
    log.append(RunEnded(code=0, reason="done"))
    log.flush()
    assert [event.seq for event in read_events(path)] == [1]
    log.close()
    log.close()


def test_a_log_without_a_file_still_feeds_its_folds() -> None:
    one, two = Seen(), Seen()
    log = EventLog(clock=lambda: 3.0, wall=lambda: 0.0, folds=[one, two])
    log.append(RunEnded(code=0, reason="done"))
    log.close()
    assert one.events == two.events == [RunEnded(seq=1, t=0.0, wall=0.0, code=0, reason="done")]


def test_nan_and_infinities_in_tags_have_a_written_form(tmp_path: Path) -> None:
    """JSON has none, so a plain encoder would write null and lose which one it was."""
    tags = {"reward": [math.nan, math.inf, -math.inf, None, 1.0], "score": math.nan, "version": 3}
    path = tmp_path / "events.jsonl"
    write(path, [Put(group=0, keys=[f"v3_p0_g{i}" for i in range(5)], tags=written(tags))])
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    [event] = read_events(path)
    assert isinstance(event, Put)
    back = unwritten(event.tags)
    assert math.isnan(back["reward"][0])
    assert math.isnan(back["score"])
    assert back["reward"][1:] == [math.inf, -math.inf, None, 1.0]
    assert back["version"] == 3


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text())


def same(one: object, other: object) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return type(one) is type(other) and one == other


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.text(), st.one_of(SCALARS, st.lists(SCALARS))))
def test_any_tag_value_comes_back_with_its_type(tags: dict[str, object]) -> None:
    back = unwritten(msgspec.json.decode(msgspec.json.encode(written(tags))))
    assert back.keys() == tags.keys()
    assert all(same(back[name], tags[name]) for name in tags)
