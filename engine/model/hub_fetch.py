"""Fetches a model of the Hugging Face Hub into its cache: a process of its own, which a deadline can end.

It is run by its path, with a name and a revision, and imports nothing of asyncrl. It prints one JSON object: `folder`,
or `kind` and `detail` of what went wrong.
"""

import json
import sys
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

_REST = ["*.json", "*.txt", "*.model", "*.jinja", "LICENSE*", "README*"]
_KINDS: list[tuple[type[Exception], str]] = [
    (GatedRepoError, "gated"),
    (RepositoryNotFoundError, "not_found"),
    (RevisionNotFoundError, "no_revision"),
    (HFValidationError, "not_found"),
    (LocalEntryNotFoundError, "unreachable"),
]
"""The first that fits counts: a gated repository is also one that was not found."""


def fetch(name: str, revision: str) -> str:
    """Return the folder of the snapshot; the hub is asked which commit a branch or a tag is.

    Files in subfolders are other formats of the same weights. Pickled weights are fetched if safetensors are missing.
    """
    folder = ""
    for weights in ("*.safetensors", "*.bin"):
        folder = snapshot_download(
            name, revision=revision, allow_patterns=[*_REST, weights], ignore_patterns=["*/*"], library_name="asyncrl"
        )
        if any(Path(folder).glob(weights)):
            break
    return folder


def answer(name: str, revision: str) -> dict[str, str]:
    """Return what is printed: `folder`, or `kind` and `detail`."""
    try:
        return {"folder": fetch(name, revision)}
    except Exception as error:  # The edge of the process: the one that started it makes an error of its own of it.
        kind = next((kind for type_, kind in _KINDS if isinstance(error, type_)), "failed")
        # Behind what the cache lacks is why the hub was not asked.
        cause = error.__cause__ or error if kind == "unreachable" else error
        return {"kind": kind, "detail": " ".join(f"{type(cause).__name__}: {cause}".split())[:300]}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(answer(*sys.argv[1:])))
