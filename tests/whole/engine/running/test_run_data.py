"""A run on a data file: the reward sees the record, the log does not, and a replay needs no file."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl import ConfigError, RunFailed, Summary, replay
from asyncrl.collectors.tasks import Task
from asyncrl.engine.records import Prompt
from asyncrl.engine.running.host import Host

Small = Callable[..., Summary]
SEEN: list[str] = []


class Noted(Task):
    """Rewards by a column of the record; lists no prompts."""

    def score(self, prompt: Prompt, response: str) -> float:
        SEEN.append(prompt.fields["note"])
        return float(len(response))


def write(path: Path, *, bad: str) -> str:
    good = [json.dumps({"prompt": f"{n}>", "answer": n, "note": f"secret {n}"}) for n in range(4)]
    path.write_text("\n".join([*good, bad]), encoding="utf-8")
    return str(path)


def test_a_record_reaches_the_reward_and_a_replay_needs_no_file(
    small: Small, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "train.jsonl", bad="{}")
    options = {
        "data.path": path,
        "data.on_bad_record": "skip",
        "task.name": f"{__name__}:Noted",
        "rollout.requeue_tries": 1,
    }
    SEEN.clear()
    summary = small({"run.batches": 6, **options})
    assert set(SEEN) == {f"secret {n}" for n in range(4)}
    assert summary.to_dict()["skipped_records"]["bad_record"] > 0
    assert '"bad":1,' in (summary.directory / "log.jsonl").read_text(encoding="utf-8").replace(" ", "")
    assert capfd.readouterr() == ("", "")
    log = (summary.directory / "events.jsonl").read_text(encoding="utf-8")
    assert "train:3" in log
    assert "secret" not in log
    Path(path).unlink()
    assert replay(summary.directory).difference is None


def test_a_bad_record_that_was_not_seen_before_the_start_ends_the_run_by_name(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "train.jsonl", bad='{"prompt": "1>"}')
    with pytest.raises(ConfigError, match=r"train\.jsonl, line 5 has no field 'answer'"):
        small({"data.path": path})
    monkeypatch.setattr("asyncrl.collectors.data.check.CHECKED_RECORDS", 1)
    monkeypatch.setattr("asyncrl.collectors.data.check._sample", lambda count: iter([0]))
    with pytest.raises(RunFailed, match=r"train\.jsonl, line 5 has no field 'answer'"):
        small({"data.path": path, "data.max_prompt_tokens": 4})


def test_a_task_without_prompts_and_data_says_what_to_give(small: Small) -> None:
    with pytest.raises(ConfigError, match=r"list some in prompts\(\), or give a file with --data FILE"):
        small({"task.name": f"{__name__}:Noted"})


def test_options_of_data_without_data_are_refused(small: Small) -> None:
    with pytest.raises(ConfigError, match=r"data\.holdout .* is 0\.5, and data\.path is null and data\.sets empty"):
        small({"data.holdout": 0.5})


def test_a_missing_chat_template_is_warned_of_once_in_the_log_and_to_the_host(
    small: Small, tmp_path: Path, llama_checkpoint: Path
) -> None:
    told: list[str] = []

    class Listening(Host):
        def tell(self, line: str) -> None:
            told.append(line)

    path = write(tmp_path / "train.jsonl", bad='{"prompt": "4>", "answer": 4}')
    options = {"data.path": path, "reward.functions": [{"name": "exact_match"}], "model.path": str(llama_checkpoint)}
    directory = small({"run.batches": 1, **options}, host=Listening()).directory
    log = (directory / "log.jsonl").read_text(encoding="utf-8")
    assert sum("no chat template, so prompts go in as plain text" in line for line in told) == 1
    assert any("rollout.max_new_tokens is 2" in line for line in told)
    assert log.count("no chat template, so prompts go in as plain text") == 1
