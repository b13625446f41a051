"""No secret of the environment, and no login of a URL, is in a run's folder."""

import gzip
from pathlib import Path
from typing import Any

import pytest
import structlog
from tests.whole.engine.running.conftest import Small

from asyncrl import ConfigError, Prompt, RunFailed, Task, load_config
from asyncrl.configs import Loaded, flatten
from asyncrl.engine.running.redaction import Redaction

TOKEN = 'hf_"quoted"\\and-long'
URL = "https://someone:hunter2@judge.example/v1"


class Leaks(Task):
    """Its scores fail with what errors of HTTP clients may hold; the last one ends the run."""

    def prompts(self) -> list[Prompt]:
        return [Prompt(i, "7>", "7") for i in range(64)]

    def score(self, prompt: Prompt, response: str) -> float:
        structlog.get_logger().warning("the judge is slow", url=URL, token=TOKEN)
        raise RuntimeError(f"401 from {URL} with Bearer {TOKEN}")


def files_of(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): (
            gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        ).decode("utf-8", "replace")
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_what_user_code_raises_and_logs_is_written_without_secrets(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("WANDB_API_KEY", "local-0123456789abcdef")
    with pytest.raises(RunFailed):
        small({"task.name": f"{__name__}:Leaks", "collector.on_error": "skip", "collector.max_failures_in_a_row": 3})
    found = files_of(tmp_path / "out")
    for name, text in found.items():
        assert not [secret for secret in ("and-long", "hunter2", "0123456789abcdef") if secret in text], name
    # Without the redaction they would be in each of these.
    for name in ("events.jsonl", "log.jsonl", "summary.json"):
        assert "[HF_TOKEN]" in found[name], found[name][-2000:]
        assert "https://[login]@judge.example/v1" in found[name]


@pytest.mark.parametrize(
    ("path", "value"),
    [("collector.servers", [URL]), ("task.options", {"judge": {"key": f"Bearer {TOKEN}"}}), ("data.path", TOKEN)],
)
def test_a_configuration_with_a_secret_is_refused_without_showing_it(path: str, value: Any) -> None:
    loaded = _loaded({path: value})
    with pytest.raises(ConfigError, match=path) as refused:
        Redaction({"HF_TOKEN": TOKEN}).check(loaded)
    assert "hunter2" not in str(refused.value)
    assert "and-long" not in str(refused.value)


def test_short_values_and_other_variables_hide_nothing() -> None:
    redact = Redaction({"MY_TOKEN": "reverse", "TOKENIZERS_PARALLELISM": "false-or-true", "PATH": "/usr/local/bin"})
    text = "reverse false-or-true /usr/local/bin git@github.com ssh://git@github.com/x http://127.0.0.1:80/a@b"
    assert redact(text) == text
    assert Redaction({"A_TOKEN": "12345678", "B_TOKEN": "123456789"})("123456789") == "[B_TOKEN]"


def _loaded(overrides: dict[str, Any]) -> Loaded:
    config = load_config("default", overrides)
    return Loaded(config, dict.fromkeys(flatten(config), "--set"))
