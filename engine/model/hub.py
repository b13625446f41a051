"""A model that is named as on the Hugging Face Hub: from the name to the folder of its snapshot, fetched if need be.

A run reads the folder alone. Invariant: the hub is asked in one place, before anything starts, and within a deadline.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from asyncrl.engine.errors import ConfigError
from asyncrl.engine.model.settings import weight_map_files

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAIN = "main"

Fetch = Callable[[str, str, float], Mapping[str, str]]
"""Fetches (name, revision, seconds): `folder`, or `kind` and `detail` of why not."""


def is_on_hub(path: str | None) -> bool:
    """Whether `model.path` has the form owner/name; a file or a folder of that name comes first."""
    return path is not None and _NAME.fullmatch(path) is not None and not Path(path).exists()


def source_of(folder: str) -> tuple[str, str | None]:
    """Return name and commit of a snapshot in the hub's cache; of any other folder the folder, and None.

    Example: `/cache/models--ada--tiny/snapshots/0f3c…` is (`ada/tiny`, `0f3c…`).
    """
    parts = Path(folder).parts
    if len(parts) > 2 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return parts[-3].removeprefix("models--").replace("--", "/"), parts[-1]
    return folder, None


def cached_snapshot(name: str, revision: str | None) -> Path | None:
    """Return the folder of a model in the cache, by what was last known of the revision; None if it is not whole."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, revision=revision or _MAIN, local_files_only=True))
    except LocalEntryNotFoundError as error:
        # What is reported as missing may be a file that no run needs, such as the same weights in another format.
        found = getattr(error, "snapshot_path", None)
        if found is None:
            return None
        folder = Path(found)
    except HFValidationError:
        return None
    return folder if _is_whole(folder) else None


def find_snapshot(
    name: str, revision: str | None, *, timeout_s: float, tell: Callable[[str], None], fetch: Fetch | None = None
) -> Path:
    """Return the folder of a model: as the hub has it now, or where it cannot be reached as the cache has it.

    A commit that is in the cache, and any model where HF_HUB_OFFLINE is set, is not asked for. ConfigError says what is
    missing: the model, the revision, access, the hub, or time.
    """
    from huggingface_hub import constants

    offline, cached, asked = constants.HF_HUB_OFFLINE, cached_snapshot(name, revision), _asked(name, revision)
    if cached is None:
        check_online(name, revision)
    if cached is not None and (offline or _COMMIT.fullmatch(revision or "")):
        return cached
    tell(f"asking {constants.ENDPOINT} for {name}; what is not in the cache is fetched, for at most {timeout_s:g} s")
    answer = (fetch or fetch_in_process)(name, revision or _MAIN, timeout_s)
    if "folder" in answer:
        folder = Path(answer["folder"])
        if not _is_whole(folder):
            raise ConfigError(f"{asked} is not a checkpoint: {folder} lacks config.json, weights or a tokenizer")
        return folder
    if cached is not None and answer["kind"] in ("unreachable", "failed", "late"):
        tell(f"{constants.ENDPOINT} did not give {name} ({answer['detail']}); the cache has it, and that is taken")
        return cached
    raise ConfigError(_refusal(answer, asked, name, timeout_s))


def check_online(name: str, revision: str | None) -> None:
    """Refuse to fetch a model where HF_HUB_OFFLINE is set; ConfigError says what to do instead."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            f"{_asked(name, revision)} is not in the cache ({cache_folder()}), and HF_HUB_OFFLINE is set; unset it, "
            f"fetch the model first (hf download {name}), or name a folder"
        )


def fetch_in_process(name: str, revision: str, timeout_s: float) -> Mapping[str, str]:
    """Fetch in a process of its own, which is killed at the deadline: a download in a thread could not be stopped."""
    from asyncrl.engine.model import hub_fetch

    command = [sys.executable, "-P", str(hub_fetch.__file__), name, revision]
    environment = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
        answer: Mapping[str, str] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"kind": "late", "detail": f"{timeout_s:g} s were over"}
    except ValueError:
        last = done.stderr.strip().rpartition("\n")[2]
        return {"kind": "failed", "detail": f"the process ended with code {done.returncode}: {last}"}
    return answer


def cache_folder() -> str:
    """Return where the hub's models are kept on this machine."""
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)


def _asked(name: str, revision: str | None) -> str:
    return f"model.path is {name!r}, which is not a folder here, and the model of this name on the Hub" + (
        f" at model.revision {revision!r}" if revision else ""
    )


def _refusal(answer: Mapping[str, str], asked: str, name: str, timeout_s: float) -> str:
    detail = answer["detail"]
    why = {
        "gated": "is gated: accept its terms on its page and log in (hf auth login, or HF_TOKEN)",
        "not_found": "was not found: check the spelling; a private one needs a login (hf auth login, or HF_TOKEN)",
        "no_revision": "was found without that revision; it must be a branch, a tag or a commit (model.revision)",
        "unreachable": f"is not in the cache ({cache_folder()}), and the Hub cannot be reached: fetch it where it can "
        f"(hf download {name}), or name a folder",
        "late": f"was not fetched within model.fetch_timeout_s {timeout_s:g}; the next run goes on where this one "
        "ended, or raise it",
        "failed": f"was not fetched; is there room in {cache_folder()}?",
    }[answer["kind"]]
    return f"{asked} {why} ({detail})"


def _is_whole(folder: Path) -> bool:
    """Whether a folder has what a run reads: links of an interrupted download lead nowhere and do not count."""
    indices = [path for path in folder.glob("*.index.json") if path.is_file()]
    names = {name for index in indices for name in weight_map_files(index)}
    weights = [folder / name for name in names] or [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    return (folder / "config.json").is_file() and tokenizer and bool(weights) and all(map(Path.is_file, weights))
