"""The token of a run's own Ray cluster, without which Ray's processes answer no call.

Ray's own default is one token per user, for good, in a file with the permissions of the umask. Invariant: each run has
a new token; its file is this user's alone, it is in no log and no variable, and it goes with the run.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import ray

_MODE, _TOKEN, _PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_ON = "token"


@contextmanager
def ray_token() -> Iterator[None]:
    """Have a cluster that is started within the context ask for a token of its own.

    What the user has set of Ray's authentication stays as it is, and a Ray that has none stays without.
    """
    mode = os.environ.get(_MODE)
    chosen = mode not in (None, _ON) or _TOKEN in os.environ or _PATH in os.environ
    if chosen or not hasattr(ray._raylet, "AuthenticationTokenLoader"):
        yield
        return
    with TemporaryDirectory(prefix="asyncrl-ray-") as folder:
        path = Path(folder) / "token"
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as stream:
            stream.write(secrets.token_hex(32))
        os.environ[_MODE], os.environ[_PATH] = _ON, str(path)
        _read_anew()
        try:
            yield
        finally:
            del os.environ[_PATH]
            if mode is None:
                del os.environ[_MODE]
            _read_anew()


def _read_anew() -> None:
    """Have Ray look at the variables again: it has read them at its import, and remembers the last run's token."""
    ray._raylet.Config.initialize("")
    ray._raylet.AuthenticationTokenLoader.instance().reset_cache()
