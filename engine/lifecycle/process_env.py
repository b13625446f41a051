"""The environment of every process of a run on one node; set before Ray is imported.

Ray reads some of it at import, so `prepare` refuses to come too late. Nothing here is a knob:
users set options, not variables.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from asyncrl.engine.errors import ConfigError

_LOOPBACK = {
    # Ray and TransferQueue then listen on 127.0.0.1; read when Ray is imported.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "GLOO_SOCKET_IFNAME": "lo",
}
_FRUGAL = {
    # More threads than cores would compete for them, so each process has few.
    "OMP_WAIT_POLICY": "passive",
    # glibc keeps what a thread has freed for that thread: each thread that has run a large model's micro-batch would
    # keep its activations.
    "MALLOC_ARENA_MAX": "2",
    "TQ_CLIENT_ZMQ_IO_THREADS": "1",
    "TQ_NUM_THREADS": "1",
}
_AS_STARTED = {
    # Under `uv run` Ray would make every worker build the project's environment anew, after packing up the folder.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
_QUIET = {
    "TQ_LOGGING_LEVEL": "ERROR",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def prepare(threads: int) -> None:
    """Set the variables that are not set; RuntimeError if Ray was already imported without them."""
    if _too_late():
        raise RuntimeError("prepare the environment before importing ray, or Ray listens on all interfaces")
    for name, value in _wanted(threads).items():
        os.environ.setdefault(name, value)


@contextmanager
def prepared(threads: int) -> Iterator[None]:
    """Prepare for the length of the context, and restore the environment after it."""
    added = _wanted(threads).keys() - os.environ.keys()
    prepare(threads)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def check_no_other_ray() -> None:
    """ConfigError if other code of this process imported or started Ray."""
    if "ray" not in sys.modules:
        return
    if sys.modules["ray"].is_initialized():
        raise ConfigError(
            "run.runtime is 'ray', and Ray runs in this process already; a run has a Ray of its own. "
            "Call ray.shutdown() first, or set run.runtime to 'local'"
        )
    if _too_late():
        raise ConfigError(
            "run.runtime is 'ray', and this process has imported ray before the run, so that Ray would listen on all "
            "interfaces. Start without that import, or set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 before it"
        )


def _wanted(threads: int) -> dict[str, str]:
    return {**_LOOPBACK, **_FRUGAL, **_AS_STARTED, **_QUIET, "OMP_NUM_THREADS": str(threads)}


def _too_late() -> bool:
    """Whether Ray was imported without the setting, which it read then."""
    constants = sys.modules.get("ray._private.ray_constants")
    return "ray" in sys.modules and bool(getattr(constants, "ENABLE_RAY_CLUSTER", True))
