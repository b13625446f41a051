"""What the Megatron backend refuses before anything starts."""

from collections.abc import Sequence
from typing import Any

import pytest

from asyncrl.configs import load, parse_set
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.running import megatron_checks
from asyncrl.engine.running.megatron_checks import check_megatron, check_megatron_model


def loaded(*settings: str) -> Any:
    return load("default", [parse_set(setting) for setting in ("trainer.backend=megatron", *settings)])


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_checks, "_is_installed", lambda: True)


def test_what_is_not_installed_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_checks, "_is_installed", lambda: False)
    with pytest.raises(ConfigError, match=r"trainer\.backend \(from --set .* is 'megatron'.*scripts/install megatron"):
        check_megatron(loaded())
    check_megatron(load())


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["lora.rank=4"], r"lora\.rank \(from --set lora\.rank=4\) is 4 .*must be left out or null"),
        (["trainer.offload_optimizer=true"], r"trainer\.offload_optimizer .* is True"),
        (["trainer.precision=bf16_weights", "model.dtype=bfloat16"], r"trainer\.precision .* is 'bf16_weights'"),
        (["trainer.compile=true"], r"trainer\.compile .* is True .*not compiled"),
        (["trainer.share_prompts=true"], r"trainer\.share_prompts .* is True"),
        (["run.runtime=local"], r"run\.runtime 'local'.*trainer\.ranks \(from default\) is 2.*ranks must be 1"),
    ],
)
def test_options_that_it_does_not_have_are_refused_with_the_reason(settings: Sequence[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_megatron(loaded(*settings))


@pytest.mark.usefixtures("installed")
def test_defaults_are_no_wish() -> None:
    check_megatron(loaded())
    check_megatron(loaded("trainer.compile=false", "run.runtime=local", "trainer.ranks=1"))
    check_megatron(loaded("trainer.router_replay=true"))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["trainer.ranks=8", "trainer.tensor_parallel=8"], r"trainer\.tensor_parallel is 8, which must divide .*: 4"),
        (["trainer.ranks=3", "trainer.pipeline_parallel=3"], r"trainer\.pipeline_parallel is 3.* layers: 2"),
        (["trainer.ranks=2", "trainer.expert_parallel=2"], r"trainer\.expert_parallel is 2; .*no experts"),
    ],
)
def test_a_model_that_cannot_be_divided_so_is_refused(settings: Sequence[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_megatron_model(loaded(*settings), ())


def test_a_tasks_tensors_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"the extra 'image'.*'megatron', whose models take token ids alone"):
        check_megatron_model(loaded(), ["image"])
    check_megatron_model(loaded("trainer.tensor_parallel=2"), ())
