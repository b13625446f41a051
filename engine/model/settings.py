"""What a checkpoint's own files say of how it generates."""

import json
from pathlib import Path
from typing import Any

from asyncrl.engine.errors import ConfigError

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "suppress_tokens")


def end_tokens(path: str) -> list[int]:
    """Return the end tokens that the model's own settings list: generation_config.json's, else config.json's."""
    for name in ("generation_config.json", "config.json"):
        file = Path(path) / name
        found = read_json(file).get("eos_token_id") if file.is_file() else None
        if found is not None:
            return [found] if isinstance(found, int) else list(found)
    return []


def sampling_settings(path: str) -> dict[str, Any]:
    """Return what generation_config.json says of sampling; a run samples by its own configuration instead."""
    file = Path(path) / "generation_config.json"
    found = read_json(file) if file.is_file() else {}
    return {name: found[name] for name in _SAMPLING if found.get(name) is not None}


def read_json(file: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds; ConfigError for anything else."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} holds no JSON object")
    return found


def why_not_loaded(error: BaseException) -> str:
    """Return in one line why transformers did not load something."""
    line = " ".join(str(error).split())
    if "trust_remote_code" in line:
        return "it comes with code of its own, and asyncrl runs no code of a checkpoint"
    return line[:300] or type(error).__name__
