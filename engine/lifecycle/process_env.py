"""The environment of every process of a run; set before Ray is imported.

Ray reads some of it at import, so `prepare` refuses to come too late. Nothing here is a knob:
users set options, not variables.
"""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from asyncrl.configs import RunConfig
from asyncrl.configs.sections.cluster import ADDRESS
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.lifecycle.orphans import MARK, mark

_LOOPBACK = {
    # Ray and TransferQueue then listen on 127.0.0.1; read when Ray is imported.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "GLOO_SOCKET_IFNAME": "lo",
}
_JOINS = {
    # What `ray job submit` was given as working folder is this process's; ours goes to the nodes in its place.
    "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1",
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
_OF_OWN_CLUSTER = {
    # Ray's own server would keep records of actors' calls: it grew from 29 to 382 MB in 30 minutes of small steps.
    "RAY_task_events_report_interval_ms": "0",
}
_READABLE = {
    # Ray writes what an actor does over its environment, and the mark of the run in it would be lost (orphans.py).
    "SPT_NOENV": "1",
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


def prepare(threads: int, *, joins: str | None = None) -> None:
    """Set the variables that are not set; RuntimeError if Ray was already imported without them.

    A process that `joins` the cluster at an address uses that cluster's interfaces, and does not ask for loopback.
    """
    if _too_late() and joins is None:
        raise RuntimeError("prepare the environment before importing ray, or Ray listens on all interfaces")
    for name, value in _wanted(threads, joins=joins).items():
        os.environ.setdefault(name, value)


@contextmanager
def prepared(threads: int, *, joins: str | None = None) -> Iterator[None]:
    """Prepare for the length of the context, mark this process as a run's driver, and restore the environment after."""
    added = _wanted(threads, joins=joins).keys() - os.environ.keys()
    prepare(threads, joins=joins)
    # A run that a process of another run starts has a driver of its own.
    other = os.environ.get(MARK)
    os.environ[MARK] = mark()
    try:
        yield
    finally:
        os.environ.pop(MARK)
        if other is not None:
            os.environ[MARK] = other
        for name in added:
            os.environ.pop(name, None)


def variables_for_nodes(threads: int, names: Sequence[str]) -> dict[str, str]:
    """Return what the processes on other nodes need: ours, and those of this process that the user `names`."""
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ConfigError(f"cluster.environment names {missing[0]}, which is not set here; set it, or leave it out")
    # There Ray shows a part the GPUs that it asked for, and none if it asked for none.
    quiet = {**_QUIET, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}
    return {**_FRUGAL, **quiet, "OMP_NUM_THREADS": str(threads), **{name: os.environ[name] for name in names}}


def cluster_address(config: RunConfig) -> str | None:
    """Return the address of the cluster that a run joins, of its configuration or Ray's own variable; None: its own.

    ConfigError if the variable has an address of another kind, such as that of a dashboard.
    """
    told = os.environ.get("RAY_ADDRESS")
    if config.run.runtime != "ray":
        return None
    if config.cluster.address is not None or not told or told == "local":
        return config.cluster.address
    if not re.fullmatch(ADDRESS, told):
        raise ConfigError(
            f"RAY_ADDRESS is {told!r}; it must be the host:port that `ray start --head` printed, or auto. Unset it, or "
            "give another with --ray-address"
        )
    return told


def check_no_other_ray(*, joins: bool = False) -> None:
    """ConfigError if other code of this process started Ray, or imported it so that a cluster of ours would be open."""
    if "ray" not in sys.modules:
        return
    if sys.modules["ray"].is_initialized():
        raise ConfigError(
            "run.runtime is 'ray', and Ray runs in this process already; a run starts or joins Ray itself. "
            "Call ray.shutdown() first, or set run.runtime to 'local'"
        )
    if _too_late() and not joins:
        raise ConfigError(
            "run.runtime is 'ray', and this process has imported ray before the run, so that Ray would listen on all "
            "interfaces. Start without that import, or set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 before it"
        )


def _wanted(threads: int, *, joins: str | None) -> dict[str, str]:
    # For an address on loopback Ray would else try the same port of another interface.
    joined = {**_JOINS, **(_LOOPBACK if joins and joins.startswith(("127.", "localhost:")) else {})}
    own = {**_FRUGAL, **_READABLE, **_AS_STARTED, **_QUIET, "OMP_NUM_THREADS": str(threads)}
    return {**({**_LOOPBACK, **_OF_OWN_CLUSTER} if joins is None else joined), **own}


def _too_late() -> bool:
    """Whether Ray was imported without the setting, which it read then."""
    constants = sys.modules.get("ray._private.ray_constants")
    return "ray" in sys.modules and bool(getattr(constants, "ENABLE_RAY_CLUSTER", True))
