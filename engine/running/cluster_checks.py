"""What must hold of the options of a cluster before anything starts."""

import re
import socket

from asyncrl.configs import Loaded, load
from asyncrl.configs.sections.cluster import ADDRESS
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.lifecycle.found_ray import find_ray
from asyncrl.engine.lifecycle.process_env import cluster_address, variables_for_nodes

OF_ANY_RUN = ("cluster.time_slicing",)
"""Options that have an effect without a cluster that is joined; all others would change nothing."""
_ANSWER_S = 10.0
"""Longest wait for the address to take a connection: Ray itself would try for a minute."""


def check_cluster(loaded: Loaded) -> None:
    """Refuse options of a cluster that would change nothing, or cannot work; ConfigError names option and value."""
    config, default = loaded.config, load().config.cluster
    address = cluster_address(config)
    for name in type(config.cluster).model_fields:
        value = getattr(config.cluster, name)
        if value == getattr(default, name) or address is not None or f"cluster.{name}" in OF_ANY_RUN:
            continue
        why = (
            f"run.runtime is {config.run.runtime!r}, in which all is one process"
            if config.run.runtime != "ray"
            else "the run starts a cluster of its own (cluster.address is null, and RAY_ADDRESS not set)"
        )
        raise ConfigError(
            f"cluster.{name} (from {loaded.sources[f'cluster.{name}']}) is {value!r}, and {why}, so it would change "
            "nothing; leave it out"
        )
    check_time_slicing(loaded, joins=address is not None)
    if address is not None:
        variables_for_nodes(1, config.cluster.environment)
        for option, gpus, section in (
            ("cluster.rank_gpus", config.cluster.rank_gpus, "trainer"),
            ("cluster.collector_gpus", config.cluster.collector_gpus, "collector"),
        ):
            _check_gpus(loaded, option, gpus, f"{section}.device")
        _check_answers(address)


def check_time_slicing(loaded: Loaded, *, joins: bool) -> None:
    """Refuse time slicing where a part could not leave its device, or would do so for nobody.

    ConfigError names both options.
    """
    config = loaded.config
    asked = config.cluster.time_slicing
    if asked is None:
        return
    source = f"cluster.time_slicing (from {loaded.sources['cluster.time_slicing']}) is {asked!r}"
    collector, trainer = config.collector, config.trainer
    odd: dict[str, tuple[str, str]] = {}
    if collector.engine in ("vllm", "http"):
        odd["collector.engine"] = "an engine in another process does not leave its device", "auto, native or batch"
    if collector.engine == "batch" and asked == "recompute":
        odd["collector.engine"] = "whole batches end first, so that there is no cache", "auto or native"
    if {collector.device, trainer.device} == {"cpu", "cuda"}:
        odd["collector.device"] = f"trainer.device is {trainer.device!r}, so that they share none", trainer.device
    if trainer.is_sharded:
        odd["trainer.sharding"] = "parts of a model do not leave their devices", "none"
    if trainer.weight_transport in ("cuda_ipc", "nccl"):
        odd["trainer.weight_transport"] = (
            "weights on that way stay on the device",
            "auto, object_store or shared_memory",
        )
    for option, (why, must) in odd.items():
        section, _, key = option.partition(".")
        value = getattr(getattr(config, section), key)
        raise ConfigError(
            f"{source}, and {option} (from {loaded.sources[option]}) {value!r}: {why}. It must be {must}, or "
            "cluster.time_slicing null"
        )
    if joins:
        raise ConfigError(
            f"{source}, and the run joins a Ray cluster, where each part has its place all the time; it must be null, "
            "or the run have a cluster of its own (cluster.address null)"
        )


def _check_gpus(loaded: Loaded, option: str, gpus: float | None, path: str) -> None:
    section, _, key = path.partition(".")
    device = getattr(getattr(loaded.config, section), key)
    if (gpus and device == "cpu") or (gpus == 0 and device == "cuda"):
        raise ConfigError(
            f"{option} (from {loaded.sources[option]}) is {gpus:g}, and {path} (from {loaded.sources[path]}) is "
            f"{device!r}; one of them must change, or {option} be null"
        )


def _check_answers(address: str) -> None:
    if address == "auto":
        _check_runs_here()
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {address} ({error}); --ray-address, cluster.address or RAY_ADDRESS must be the "
            "host:port that `ray start --head` printed, or auto"
        ) from error


def _check_runs_here() -> None:
    found = find_ray()
    if not found.running and found.last is None:
        raise ConfigError(
            "--ray-address, cluster.address or RAY_ADDRESS is auto, and no Ray runs on this host: start one with "
            "`ray start`, or name the host:port that `ray start --head` printed"
        )
    if not found.running and found.last is not None and re.fullmatch(ADDRESS, found.last):
        _check_answers(found.last)
