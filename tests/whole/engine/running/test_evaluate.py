"""`asyncrl eval` and `asyncrl.evaluate`: a saved model on prompts of its own."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from asyncrl import ConfigError, Summary, evaluate
from asyncrl.engine.cli import app
from asyncrl.engine.generate import generate


@pytest.fixture
def trained(small: Callable[..., Summary]) -> Path:
    """The folder of a run that has learned to echo a little."""
    summary: Summary = small(
        {"trainer.sft_warm_up_steps": 30, "run.steps": 1, "run.batches": None, "evaluation.seed": 5}
    )
    return summary.directory


def test_greedy_figures_are_those_of_the_answers_that_the_model_gives(trained: Path) -> None:
    """Scored again by hand, from the text of `generate`."""
    found = evaluate(trained)
    answers = generate(trained, [f"{digit}>" for digit in range(10)], max_new_tokens=2)
    right = [text == str(digit) for digit, (text,) in enumerate(answers)]
    assert found.scores.pass_at_1 == sum(right) / 10
    assert sum(right) > 0
    assert (found.version, found.scores.samples, found.scores.failed_samples) == (1, 10, 0)


def test_samples_are_the_same_each_time_and_of_the_seed_that_the_run_was_configured_with(trained: Path) -> None:
    sampled = {"evaluation.samples": 8, "evaluation.temperature": 1.0}
    first, again = (evaluate(trained, sampled) for _ in range(2))
    other = evaluate(trained, {**sampled, "evaluation.seed": 6})
    assert first.scores == again.scores != other.scores
    assert list(first.scores.pass_at) == ["1", "2", "4", "8"]
    values = [estimate.value for estimate in first.scores.pass_at.values()]
    assert values == sorted(values)


def test_the_command_prints_a_table_or_one_json_object(trained: Path, tmp_path: Path) -> None:
    data = tmp_path / "test.jsonl"
    data.write_text('{"prompt": "3>", "answer": 3, "kind": "odd"}\n{"prompt": "4>", "answer": "no", "kind": "even"}\n')
    options = ["eval", str(trained), "--data", str(data), "--set", "data.dataset_column=kind"]
    printed = CliRunner().invoke(app, [*options, "--json"])
    assert printed.exit_code == 0, printed.output
    found = json.loads(printed.stdout)
    assert found["datasets"]["even"]["pass_at"]["1"]["value"] == 0.0
    assert (found["scores"]["prompts"], found["version"]) == (2, 1)
    table = CliRunner().invoke(app, options)
    assert [line.split()[0] for line in table.stdout.splitlines()[1:]] == ["data", "even", "odd", "all"]


def test_other_rewards_than_those_of_training_may_score_prompts_of_a_file(trained: Path, tmp_path: Path) -> None:
    """The default configuration's task scores by itself, and a folder that is not a run's has that configuration."""
    data = tmp_path / "test.jsonl"
    data.write_text('{"prompt": "3>", "answer": 3}\n{"prompt": "4>", "answer": "no"}\n')
    for model in (trained, trained / "model"):
        words = [
            "eval",
            str(model),
            "--data",
            str(data),
            "--json",
            "--set",
            "reward.functions=[{name: regex, pattern: n}]",
        ]
        printed = CliRunner().invoke(app, words)
        assert printed.exit_code == 0, printed.output
        assert json.loads(printed.stdout)["scores"]["pass_at"]["1"]["value"] == 0.0
    pattern = {"evaluation.path": str(data), "reward.functions": [{"name": "regex", "pattern": "."}]}
    assert evaluate(trained / "model", pattern).scores.pass_at_1 == 1.0


def test_what_cannot_be_evaluated_is_refused_by_option(trained: Path, tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "3>", "answer": 3}\n')
    silent = tmp_path / "silent_task.py"
    silent.write_text(
        "from asyncrl import Prompt, Task\n"
        "class Silent(Task):\n"
        "    def prompts(self):\n"
        "        return [Prompt(0, '1>')]\n"
        "    def score(self, prompt, response):\n"
        "        return 0.0\n"
    )
    for overrides, why in (
        ({"evaluation.path": "none.jsonl"}, "evaluation: none.jsonl cannot be read"),
        ({"data.path": str(data)}, "evaluation.path is null, evaluation.sets empty and data.holdout 0"),
        ({"task.name": f"{silent}:Silent"}, "no prompts for evaluations"),
        ({"evaluation.device": "cuda"}, "evaluation.device .* is 'cuda' and torch sees no GPU"),
    ):
        with pytest.raises(ConfigError, match=why):
            evaluate(trained, overrides)
    with pytest.raises(ConfigError, match="is neither a run's folder nor a Hugging Face checkpoint"):
        evaluate(tmp_path)
    refused = CliRunner().invoke(app, ["eval", str(trained), "--samples", "4"])
    assert refused.exit_code == 2
    assert "evaluation.samples is 4 and evaluation.temperature 0" in refused.output


def test_without_a_scored_sample_the_command_fails(trained: Path, tmp_path: Path) -> None:
    rewards = tmp_path / "broken_reward.py"
    rewards.write_text("def broken(prompt, response):\n    raise ValueError('no judge')\n")
    data = tmp_path / "test.jsonl"
    data.write_text('{"prompt": "3>", "answer": 3}\n')
    options = ["--data", str(data), "--set", f"data.path={data}", "--reward", f"{rewards}:broken"]
    failed = CliRunner().invoke(app, ["eval", str(trained), *options])
    assert failed.exit_code == 1
    assert "none of 1 prompts has a scored sample" in failed.output
    assert "no judge" in failed.output
