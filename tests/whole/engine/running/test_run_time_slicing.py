"""Runs whose ranks and generators have the device in turns: what they learn, how they replay, and what is refused."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from asyncrl import ConfigError, Summary, replay
from asyncrl.configs import Override, load
from asyncrl.engine.running.cluster_checks import check_cluster

Small = Callable[..., Summary]

LONG = {"rollout.max_new_tokens": 6, "run.batches": 4, "trainer.ranks": 2, "rollout.group_size": 4}


def check_ledger(ledger: Mapping[str, Any]) -> None:
    assert [ledger[place] for place in ("in_flight", "buffered", "claimed", "in_training")] == [0, 0, 0, 0]
    ended = ledger["trained"] + sum(sum(ledger[kind].values()) for kind in ("masked", "dropped", "failed"))
    assert ledger["dispatched"] == ended > 0


def weights_of(folder: Path) -> dict[str, Any]:
    return load_file(folder / "model" / "model.safetensors")


@pytest.mark.parametrize("engine", ["native", "batch"])
@pytest.mark.parametrize("slicing", ["keep", "recompute"])
def test_at_staleness_0_the_weights_are_those_without_to_the_bit(small: Small, engine: str, slicing: str) -> None:
    if (engine, slicing) == ("batch", "recompute"):
        pytest.skip("refused: whole batches keep no cache")
    given = {**LONG, "rollout.max_staleness": 0, "collector.engine": engine}
    plain = small(given, directory="plain")
    sliced = small({**given, "cluster.time_slicing": slicing}, directory="sliced")
    expected = weights_of(plain.directory)
    assert all((expected[name] == value).all() for name, value in weights_of(sliced.directory).items())
    assert plain.ledger == sliced.ledger


@pytest.mark.parametrize("slicing", ["keep", "recompute"])
def test_at_staleness_2_every_sample_has_one_fate_and_the_log_replays(small: Small, slicing: str) -> None:
    given = {**LONG, "rollout.max_staleness": 2, "cluster.time_slicing": slicing, "collector.count": 2}
    more = {"run.batches": 8, "checkpoint.every_steps": 2, "trainer.reference_kl": 0.01}
    summary = small({**given, **more})
    check_ledger(summary.ledger)
    assert max(map(int, summary.trained_age_histogram)) <= 2
    assert replay(summary.directory).difference is None
    steps = [json.loads(line) for line in (summary.directory / "events.jsonl").read_text("utf-8").splitlines()]
    waited = [event["metrics"]["flow/device_wait_s"] for event in steps if event["type"] == "step_ended"]
    assert len(waited) == summary.steps
    assert all(seconds > 0 for seconds in waited)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"collector.engine": "batch", "cluster.time_slicing": "recompute"}, "'batch': whole batches end first"),
        ({"collector.engine": "vllm"}, "collector.engine .*'vllm': an engine in another process does not leave"),
        ({"collector.engine": "http"}, "collector.engine .*'http': .* It must be auto, native or batch, or"),
        ({"trainer.device": "cuda", "collector.device": "cpu"}, "trainer.device is 'cuda', so that they share none"),
        ({"trainer.weight_transport": "cuda_ipc"}, "trainer.weight_transport .*'cuda_ipc': weights on that way stay"),
        (
            {"trainer.sharding": "full", "run.runtime": "ray"},
            "trainer.sharding .*'full': parts of a model do not leave",
        ),
        ({"cluster.address": "127.0.0.1:1"}, "joins a Ray cluster, where each part has its place all the time"),
    ],
)
def test_what_cannot_take_turns_is_refused_with_the_reason(given: dict[str, Any], says: str) -> None:
    values = {"cluster.time_slicing": "keep", **given}
    loaded = load("default", [Override(path, value, "--set") for path, value in values.items()])
    with pytest.raises(ConfigError, match=f"cluster.time_slicing .from --set. is .*{says}"):
        check_cluster(loaded)
