"""The environment of every process of a run on one node; set before Ray is imported.

Ray reads some of it at import, so `prepare` refuses to come too late. Nothing here is a knob:
users set options, not variables.
"""

import os
import sys

_LOOPBACK = {
    # Ray and TransferQueue then listen on 127.0.0.1; read when Ray is imported.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "GLOO_SOCKET_IFNAME": "lo",
}
_FRUGAL = {
    # More threads than cores fight for them: each process has few, whatever torch would choose.
    "OMP_WAIT_POLICY": "passive",
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
    """Set what is not set; RuntimeError if Ray is imported already without it."""
    late = "ray" in sys.modules and os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") != "0"
    if late:
        raise RuntimeError("prepare the environment before importing ray, or Ray listens on all interfaces")
    wanted = {**_LOOPBACK, **_FRUGAL, **_AS_STARTED, **_QUIET, "OMP_NUM_THREADS": str(threads)}
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
