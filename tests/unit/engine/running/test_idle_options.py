"""An option that another one leaves without an effect is refused, if a user has set it."""

from pathlib import Path
from typing import Any

import pytest

from asyncrl.configs import Loaded, load
from asyncrl.configs.load import as_overrides, flatten
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.running.checks import check_without_model
from asyncrl.engine.running.idle_options import IDLE, check_idle_options

CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"rollout.gate_timeout_s": 5.0}, {"rollout.stale_mode": "gate"}),
    ({"trainer.importance_cap": 5.0}, {"trainer.recompute_logprobs": True}),
    ({"trainer.importance_cap": 5.0}, {"trainer.updates_per_batch": 2}),
    ({"trainer.forward_tokens": 9000}, {"trainer.reference_kl": 0.1}),
    ({"trainer.sft_warm_up_batch": 5}, {"trainer.sft_warm_up_steps": 1}),
    ({"trainer.sft_warm_up_learning_rate": 0.1}, {"trainer.sft_warm_up_steps": 1}),
    ({"trainer.offload_optimizer": True, "trainer.device": "cpu"}, {"trainer.device": "auto"}),
    ({"collector.server_timeout_s": 5.0}, {"collector.engine": "http"}),
    ({"collector.cache_gib": 5.0, "collector.engine": "batch"}, {"collector.engine": "native"}),
    ({"collector.slot_tokens": 50, "collector.engine": "batch"}, {"collector.engine": "vllm"}),
    ({"collector.compile": False, "collector.engine": "batch"}, {"collector.engine": "native"}),
    ({"collector.score_timeout_s": 4.0, "environment.name": "guess"}, {"environment.name": None}),
    ({"collector.score_processes": 4, "environment.name": "guess"}, {"environment.name": None}),
    ({"collector.max_failures_in_a_row": 3, "collector.on_error": "abort"}, {"collector.on_error": "skip"}),
    ({"run.save_best": False, "run.save_model": False}, {"run.save_model": True}),
    ({"run.save_timeout_s": 5.0, "run.save_model": False}, {"run.save_model": True}),
    (
        {"checkpoint.keep": 9, "checkpoint.every_steps": None, "checkpoint.every_s": None, "checkpoint.at_end": False},
        {"checkpoint.at_end": True},
    ),
    ({"model.hidden_size": 32, "model.path": "somewhere"}, {"model.path": None}),
    ({"model.layers": 3, "model.path": "somewhere"}, {"model.path": None}),
    ({"data_plane.mooncake_segment_gib": 2.0}, {"data_plane.backend": "mooncake"}),
    ({"data_plane.shared_memory": None, "data_plane.backend": "mooncake"}, {"data_plane.backend": "simple"}),
]


def loaded(values: dict[str, Any]) -> Loaded:
    return load(overrides=as_overrides(values, "--set"))


@pytest.mark.parametrize(("given", "other"), CASES, ids=[next(iter(given)) for given, _ in CASES])
def test_an_option_is_refused_where_another_leaves_it_without_an_effect(
    given: dict[str, Any], other: dict[str, Any]
) -> None:
    option, value = next(iter(given.items()))
    usual = flatten(load().config)[option]
    with pytest.raises(ConfigError) as refused:
        check_idle_options(loaded(given))
    assert str(refused.value).startswith(f"{option} (from --set) is {value!r}, and would change nothing: ")
    assert str(refused.value).endswith(f"Leave it out (it is {usual!r} then), or change the other")
    check_idle_options(loaded({**given, **other}))


def test_every_rule_has_a_case() -> None:
    options = {option for rule in IDLE for option in rule.options}
    covered = {option for option in options if any(next(iter(given)).startswith(option) for given, _ in CASES)}
    # These stand in one rule with one that has a case.
    assert options - covered == {"model.heads", "model.intermediate_size", "checkpoint.timeout_s"}


def test_the_default_value_may_be_said() -> None:
    check_idle_options(loaded({"rollout.gate_timeout_s": 600.0, "trainer.importance_cap": 2.0}))


@pytest.mark.parametrize("preset", ["default", "reverse", "sleepy", "long_tail", "smollm2", "gsm8k-like"])
def test_what_a_preset_brings_along_is_not_refused(preset: str) -> None:
    check_idle_options(load(preset, as_overrides({"trainer.sft_warm_up_steps": 0, "run.runtime": "local"}, "--set")))


def test_a_file_of_a_user_is_not_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("rollout: {gate_timeout_s: 5}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"rollout\.gate_timeout_s \(from .*mine\.yaml\) is 5\.0"):
        check_idle_options(load(str(path)))


def test_a_run_is_checked_so_before_it_starts() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.gate_timeout_s .*rollout\.stale_mode is 'drop'"):
        check_without_model(loaded({"rollout.gate_timeout_s": 5.0}))
