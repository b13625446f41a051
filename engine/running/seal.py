"""The seal of a run's folder: the code that its user named when it ran, so that it need not be named again.

A key of the user's, kept outside the folder, signs those names (HMAC-SHA256, RFC 2104). Invariant: whoever can write
the folder and not the key can have nothing imported that this user did not name in a run of theirs.
"""

import hashlib
import hmac
import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.configs.load import as_overrides
from asyncrl.configs.named_code import code_of

FILE_NAME = "seal.json"
_KEY_BYTES = 32
_LARGEST_SEAL = 1 << 20


class _Seal(msgspec.Struct):
    code: list[str]
    seal: str


def seal(directory: Path, config: Mapping[str, Any]) -> str:
    """Say in the run's folder that this user named the code of its configuration; nothing if it names none.

    Returns a warning, empty if all is well: without a place for the key, as for a user without a home, there is no
    seal, and such code has to be named again.
    """
    code = code_of(as_overrides(config))
    if not code:
        return ""
    try:
        written = _Seal(code, _signed(_key(make=True), code))
        (directory / FILE_NAME).write_bytes(msgspec.json.encode(written))
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home.
        return (
            f"{directory / FILE_NAME} is not written ({error}); to go on with the run, name its code with --allow-code"
        )
    return ""


def sealed_code(run: Path) -> Sequence[str]:
    """Return the code that this user named for the run in this folder, or whose log this file is.

    None if its seal is missing or does not hold.
    """
    directory = run if run.is_dir() else run.parent
    try:
        path = directory / FILE_NAME
        if path.stat().st_size > _LARGEST_SEAL:
            return ()
        found = msgspec.json.decode(path.read_bytes(), type=_Seal)
        expected = _signed(_key(make=False), found.code)
    except (OSError, RuntimeError, UnicodeDecodeError, msgspec.MsgspecError):  # A RecursionError is a RuntimeError.
        return ()
    return found.code if hmac.compare_digest(found.seal.encode(), expected.encode()) else ()


def _signed(key: bytes, code: Sequence[str]) -> str:
    return hmac.new(key, msgspec.json.encode(list(code)), hashlib.sha256).hexdigest()


def _key(*, make: bool) -> bytes:
    """Return the user's key, which only they can read. OSError if it is missing, or cannot be made."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = Path(state) / "asyncrl" / "seal.key"
    if make and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written aside and linked: of two runs that start at once, both have the key of the first.
        descriptor, part = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(secrets.token_bytes(_KEY_BYTES))
            with suppress(FileExistsError):
                os.link(part, path)
        finally:
            os.unlink(part)
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise OSError(f"{path} has {len(key)} bytes, not {_KEY_BYTES}; delete it, and a new one is made")
    return key
