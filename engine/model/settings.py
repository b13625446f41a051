"""What a checkpoint's own files say of how it generates."""

import json
from pathlib import Path
from typing import Any

from asyncrl.engine.bounds import LARGEST_JSON, read_bytes
from asyncrl.engine.errors import ConfigError

_READ_WHOLE = (".json", ".jinja", ".jsonl", ".model", ".txt")
_LONGEST_NAME = 255
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "suppress_tokens")


def end_tokens(path: str) -> list[int]:
    """Return the end tokens that the model's own settings list: generation_config.json's, else config.json's."""
    for name in ("generation_config.json", "config.json"):
        file = Path(path) / name
        found = read_json(file).get("eos_token_id") if file.is_file() else None
        if found is not None:
            ends = found if isinstance(found, list) else [found]
            if not all(isinstance(end, int) for end in ends):
                raise ConfigError(f"{file} has the eos_token_id {str(found)[:100]}; it must be one number, or several")
            return ends
    return []


def sampling_settings(path: str) -> dict[str, Any]:
    """Return what generation_config.json says of sampling; a run samples by its own configuration instead."""
    file = Path(path) / "generation_config.json"
    found = read_json(file) if file.is_file() else {}
    return {name: found[name] for name in _SAMPLING if found.get(name) is not None}


def read_json(file: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds; ConfigError for anything else."""
    try:
        found = json.loads(read_bytes(file, LARGEST_JSON, ConfigError))
    except ConfigError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} holds no JSON object")
    return found


def weight_map_files(index: Path) -> list[str]:
    """Return the names of the files of weights that an index names; ConfigError if it is none."""
    named = read_json(index).get("weight_map", {})
    files = list(named.values()) if isinstance(named, dict) else [None]
    # No file has a longer name; to ask for one is an error of its own.
    names = [name for name in files if isinstance(name, str) and len(name.encode("utf-8", "replace")) <= _LONGEST_NAME]
    if len(names) < len(files):
        raise ConfigError(f"{index} has a weight_map that does not map weights to files")
    return sorted(set(names))


def check_small_files(folder: str) -> None:
    """ConfigError names a file that is not one of weights and is too large: transformers reads such files whole."""
    for path in Path(folder).iterdir():
        if path.suffix in _READ_WHOLE and path.is_file() and path.stat().st_size > LARGEST_JSON:
            raise ConfigError(
                f"{path} has {path.stat().st_size:,} bytes; settings and tokenizers have {LARGEST_JSON:,} at most"
            )


def why_not_loaded(error: BaseException) -> str:
    """Return in one line why transformers did not load something."""
    line = " ".join(str(error).split())
    if "trust_remote_code" in line:
        return "it comes with code of its own, and asyncrl runs no code of a checkpoint"
    return line[:300] or type(error).__name__
