"""`train` on checkpoints of many architectures: refused with code 2 before anything starts, or trained rightly."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from typer.testing import CliRunner

from asyncrl.engine.cli import app

SHAPE: dict[str, Any] = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 2, "eos_token_id": 1}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24}
NEO = {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4}


def configured(kind: str, **changes: Any) -> Any:
    return getattr(transformers, f"{kind}Config")(**{**SHAPE, "bos_token_id": None, "pad_token_id": 0, **changes})


def train(path: Path, *options: str, **values: Any) -> Any:
    sets = {"model.path": path, **{name.replace("__", "."): value for name, value in values.items()}}
    words = [word for name, value in sets.items() for word in ("--set", f"{name}={json.dumps(value, default=str)}")]
    return CliRunner().invoke(app, ["train", *options, *words])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, in which they start."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("config", "packed", "message"),
    [
        (configured("Mamba", state_size=4), False, "MambaForCausalLM (its layers: linear_attention) gives tokens"),
        (configured("Lfm2", **HEADS, layer_types=["conv", "full_attention"]), True, "Lfm2ShortConv in a layer of conv"),
        (configured("Bloom", n_layer=2, n_head=2), True, "it fails on them: ValueError"),
        (configured("Llama", **HEADS, max_position_embeddings=3), False, "prompt 0 has 2 tokens"),
    ],
    ids=["state_space", "convolution", "alibi", "positions"],
)
def test_a_model_that_a_run_would_get_wrong_is_refused_by_the_dry_run(
    save_checkpoint: Callable[..., Path], folder: Path, config: Any, packed: bool, message: str
) -> None:
    """FOUND-L1, FOUND-I13, FOUND-I14, FOUND-I15."""
    path = save_checkpoint(config)
    result = train(path, "--dry-run", trainer__packed=packed)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    if packed:
        assert train(path, "--dry-run", trainer__packed=False).exit_code == 0


@pytest.mark.parametrize(
    ("config", "known"),
    [(configured("Mistral", **HEADS, sliding_window=4), True), (configured("GPTNeo", **NEO), False)],
    ids=["window", "layers_named_otherwise"],
)
def test_the_first_packed_step_of_a_checkpoint_is_on_policy(
    save_checkpoint: Callable[..., Path], folder: Path, config: Any, known: bool
) -> None:
    """FOUND-L1, FOUND-I13: ratio 1 beyond the window; without known FLOPs plans go by tokens, with a warning."""
    small = {"rollout__groups_per_step": 4, "rollout__group_size": 4, "rollout__max_new_tokens": 12}
    options = ("--runtime", "local", "--run-dir", "out", "--steps", "1")
    result = train(
        save_checkpoint(config), *options, **small, rollout__max_staleness=0, trainer__packed=True, filters=[]
    )
    assert result.exit_code == 0, result.output
    events = [json.loads(line) for line in (folder / "out" / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    step = next(event for event in events if event["type"] == "step_ended")
    assert step["metrics"]["train/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert step["metrics"]["train/clipped_fraction"] == 0
    started = next(event for event in events if event["type"] == "run_started")
    assert (started["cost"] is not None) is known
    warned = "the FLOPs of this model are not known" in (folder / "out" / "log.jsonl").read_text(encoding="utf-8")
    assert warned is not known


def test_an_adapter_alone_and_layers_that_do_not_exist_are_refused(
    save_checkpoint: Callable[..., Path], folder: Path
) -> None:
    """An adapter's folder names the merged model beside it; `generate` says the same."""
    model = save_checkpoint(configured("Llama", **HEADS))
    adapter = model.with_name("adapter")
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}", encoding="utf-8")
    result = train(adapter, "--dry-run")
    assert result.exit_code == 2
    assert f"holds an adapter alone; take {model}, into which it is merged" in result.stderr
    result = CliRunner().invoke(app, ["generate", str(adapter), "1"])
    assert (result.exit_code, f"take {model}" in result.stderr) == (2, True)
    result = train(model, "--dry-run", lora__rank=4, lora__target_modules=["w1"])
    assert result.exit_code == 2
    assert "lora.target_modules has 'w1', by which no layer's name ends" in result.stderr
    assert train(model, "--dry-run", lora__rank=4).exit_code == 0
