"""A run that trains an adapter: it learns, and saves both the merged model and the adapter."""

import json
from pathlib import Path

from asyncrl import generate, run
from asyncrl.engine.model.folder import Note

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
LORA = {
    "run.runtime": "local",
    "lora.rank": 16,
    "lora.target_modules": LAYERS,
    "trainer.learning_rate": 0.003,
    "trainer.sft_warm_up_steps": 20,
    "trainer.sft_warm_up_learning_rate": 0.01,
    "trainer.weight_delta": True,
    "rollout.max_staleness": 0,
}


def test_an_adapter_on_random_weights_learns_to_echo(tmp_path: Path) -> None:
    """The embeddings stay random, so the head gets an adapter too. Supervised steps on it come first."""
    out = tmp_path / "out"
    summary = run("default", out, {**LORA, "run.batches": 30, "rollout.groups_per_step": 8, "trainer.ranks": 1})
    content = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert content["reward_last_10"] > content["reward_first_10"] + 0.1
    assert content["reward_last_10"] > 0.75
    note = Note.read(out / "model")
    assert note is not None
    assert note == Note.read(out / "adapter")
    assert (note.version, note.lora_rank) == (summary.steps, 16)
    answers = generate(out, [f"{digit}>" for digit in range(10)])
    assert sum(text == str(digit) for digit, (text,) in enumerate(answers)) >= 7
    said = [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    told = next(line for line in said if line["event"].startswith("an adapter is trained"))
    assert (told["layers"], told["numbers"]) == (LAYERS, 40_960)


def test_the_first_step_is_on_policy_and_ranks_agree(tmp_path: Path) -> None:
    """Two ranks, whose adapters are equal, and generators that hold the merged weights; with a reference."""
    without_warm_up = {key: value for key, value in LORA.items() if "sft_warm_up" not in key}
    options = {**without_warm_up, "trainer.reference_kl": 0.01}
    run("default", tmp_path / "out", {**options, "run.steps": 2, "rollout.groups_per_step": 4, "filters": []})
    lines = (tmp_path / "out" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [event["metrics"] for event in map(json.loads, lines) if event["type"] == "step_ended"]
    assert len(steps) == 2
    for metrics in steps:
        assert abs(metrics["train/ratio_mean"] - 1) < 1e-5
