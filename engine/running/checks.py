"""What must hold before a run starts, whoever starts it: told in seconds, with option, value and range."""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from asyncrl.collectors.tasks.prepared import PreparedTask
from asyncrl.configs import Loaded, RunConfig
from asyncrl.configs.sections.model import Model
from asyncrl.engine.errors import ConfigError, DataPlaneError, FilterError
from asyncrl.engine.lifecycle.process_env import check_no_other_ray, cluster_address
from asyncrl.engine.model.folder import ADAPTER_CONFIG, instead_of_adapter
from asyncrl.engine.running.cluster_checks import check_cluster
from asyncrl.engine.running.idle_options import check_idle_options
from asyncrl.engine.running.megatron_checks import check_megatron, check_megatron_model
from asyncrl.engine.running.redaction import Redaction
from asyncrl.engine.running.server_checks import check_server_options, check_servers
from asyncrl.engine.running.sources import prepare_sources, with_prompts
from asyncrl.filters import BaseRolloutFilter, build_chain
from asyncrl.filters.load import with_objects

_SHORT = 2
"""New tokens that the default preset allows."""


def check_process(config: RunConfig) -> None:
    """Check that this process can have the run: ConfigError if not."""
    if config.run.runtime == "ray":
        check_no_other_ray(joins=cluster_address(config) is not None)


def check_runnable(loaded: Loaded, objects: Sequence[BaseRolloutFilter] = ()) -> PreparedTask:
    """Check what the configuration names: filters, task, devices, checkpoint, prompts. ConfigError if not.

    `objects` are filters to be put into its chain. Returns the task, whose prompts the run goes on with: the user's
    code is not asked again.
    """
    return check_with_model(loaded, check_without_model(loaded, objects))


def check_without_model(loaded: Loaded, objects: Sequence[BaseRolloutFilter] = ()) -> PreparedTask:
    """Check what can be checked before the model's folder is there, and return the task. ConfigError if not."""
    config = loaded.config
    Redaction(os.environ).check(loaded)
    memory = config.data_plane.shared_memory
    if memory not in (None, "auto") and not (Path(memory).is_dir() and os.access(memory, os.W_OK | os.X_OK)):
        raise ConfigError(
            f"data_plane.shared_memory (from {loaded.sources['data_plane.shared_memory']}) is {memory!r}; "
            "it must be a directory that can be written to, auto, or null"
        )
    _check_mooncake(loaded)
    evaluated = () if config.evaluation.every is None else ("evaluation",)
    check_cluster(loaded)
    check_devices(loaded, "trainer", "collector", *evaluated)
    check_weight_transport(loaded)
    check_stale_mode(loaded)
    _check_synchronous(loaded)
    check_engine(loaded)
    check_megatron(loaded)
    check_server_options(loaded)
    check_idle_options(loaded)
    try:
        build_chain(with_objects(config.filters, objects), min_live=config.rollout.min_live).state_dict()
    except FilterError as error:
        raise ConfigError(f"filters (from {loaded.sources['filters']}): {error}") from error
    return prepare_sources(loaded, objects)


def check_with_model(loaded: Loaded, prepared: PreparedTask) -> PreparedTask:
    """Check the model, and that the prompts suit it; returns the task with the prompts of data sets."""
    config = loaded.config
    check_model_folder(loaded)
    check_megatron_model(loaded, prepared.task.extras)
    _check_extras(config.model, prepared.task.extras)
    _check_lora(config)
    _check_router_replay(config)
    prepared = with_prompts(config, prepared)
    _check_slots(loaded, prepared)
    if prepared.evaluation:
        from asyncrl.engine.lifecycle.checks import check_evaluation

        check_evaluation(config, prepared.evaluation)
    if config.model.path is not None:
        from asyncrl.engine.lifecycle.checks import check_checkpoint

        check_checkpoint(config, prepared.prompts, extras=prepared.task.extras)
        if config.collector.engine == "http":
            check_servers(loaded, prepared)
        return prepared
    from asyncrl.engine.model.tokenizer import CharTokenizer

    tokenizer = CharTokenizer()
    strange = [token for token in config.rollout.stop_token_ids if not 0 <= token < tokenizer.vocab_size]
    if strange:
        raise ConfigError(
            f"rollout.stop_token_ids (from {loaded.sources['rollout.stop_token_ids']}) has {strange[0]}, and the "
            f"built-in model knows tokens 0 to {tokenizer.vocab_size - 1}"
        )
    for prompt in prepared.prompts:
        try:
            tokenizer.encode(prompt.text)
        except ConfigError as error:
            raise ConfigError(f"task.name {config.task.name}: prompt {prompt.id!r}: {error}") from error
    for pair in prepared.examples:
        for text in pair:
            tokenizer.encode(text)
    return prepared


def _check_slots(loaded: Loaded, prepared: PreparedTask) -> None:
    """Refuse slots into which the longest prompt and response known do not go: such groups would all fail."""
    collector = loaded.config.collector
    if collector.slot_tokens is None or collector.engine == "batch":
        return
    from asyncrl.engine.lifecycle.parts import tokens_of_longest

    needed = tokens_of_longest(loaded.config, prepared.prompts)
    if collector.slot_tokens < needed:
        raise ConfigError(
            f"collector.slot_tokens (from {loaded.sources['collector.slot_tokens']}) is {collector.slot_tokens}, and "
            f"the longest prompt and {loaded.config.longest_option} come to {needed}; it must be null, or at least "
            f"{needed}"
        )


def _check_mooncake(loaded: Loaded) -> None:
    """Refuse Mooncake where it would have no effect, lacks something, or lends more memory than there is."""
    plane = loaded.config.data_plane
    where = f"data_plane.backend (from {loaded.sources['data_plane.backend']}) is {plane.backend!r}"
    if plane.backend != "mooncake":
        return
    if loaded.config.run.runtime == "local":
        raise ConfigError(f"{where} and run.runtime 'local', in which all is one process. One of them must be another")
    if plane.capacity_rows is not None:
        raise ConfigError(
            f"{where} and data_plane.capacity_rows (from {loaded.sources['data_plane.capacity_rows']}) "
            f"{plane.capacity_rows}; Mooncake's room is storage_units times mooncake_segment_gib. It must be null"
        )
    from asyncrl.engine.data_plane.mooncake import fault_of_installation
    from asyncrl.engine.data_plane.mooncake_service import MooncakeSettings, check_memory, free_bytes

    fault = fault_of_installation()
    if fault is not None:
        raise ConfigError(f"{where}. {fault}")
    try:
        settings = MooncakeSettings(plane.storage_units, int(plane.mooncake_segment_gib * 2**30))
        if cluster_address(loaded.config) is None:
            check_memory(settings, plane.storage_units, free_bytes())
    except DataPlaneError as error:
        raise ConfigError(str(error)) from error


def check_stale_mode(loaded: Loaded) -> None:
    """Refuse what contradicts `stale_mode: tokens`, or does nothing beside it; ConfigError names both."""
    rollout = loaded.config.rollout
    if rollout.stale_mode != "tokens":
        return
    for name, value, off, why in (
        ("cancel_stale", rollout.cancel_stale, "false", "it would cancel groups whose newer tokens that mode trains"),
        ("requeue_tries", rollout.requeue_tries, "0", "that mode drops no group for its age, so none is issued again"),
    ):
        if value:
            raise ConfigError(
                f"rollout.{name} (from {loaded.sources[f'rollout.{name}']}) is {value!r} and rollout.stale_mode "
                f"'tokens'; {why}. It must be {off}, or the mode another"
            )


def warnings_of(config: RunConfig) -> list[str]:
    """Return what a user should hear of a configuration that may run, in words: what it biases, or cuts."""
    rollout, found = config.rollout, []
    if rollout.oversample:
        found.append(
            f"rollout.oversample is {rollout.oversample}: of {rollout.group_size + rollout.oversample} answers the "
            f"{rollout.group_size} that end first are trained on, so long ones are trained on less often than they are "
            "generated; the figures of length_bias do not show it"
        )
    if config.model.path is not None and rollout.max_new_tokens <= _SHORT:
        found.append(
            f"rollout.max_new_tokens is {rollout.max_new_tokens}, which is the built-in small model's: answers of "
            f"{config.model.path} are cut after as many tokens"
        )
    return found


def _check_synchronous(loaded: Loaded) -> None:
    """Refuse what has no place in a run at `max_staleness` 0; what-ifs of a recorded run may ask about that bound."""
    rollout = loaded.config.rollout
    for name, value, odd, off, why in (
        (
            "oversample",
            rollout.oversample,
            rollout.oversample > 0,
            "0",
            "which answers end first is a matter of time, and a run at 0 can be repeated exactly",
        ),
        (
            "stale_mode",
            rollout.stale_mode,
            rollout.stale_mode == "tokens",
            "drop",
            "at 0 all tokens of a group have one age, so none is left to train where another is too old",
        ),
    ):
        if odd and not rollout.max_staleness:
            raise ConfigError(
                f"rollout.{name} (from {loaded.sources[f'rollout.{name}']}) is {value!r} and rollout.max_staleness 0 "
                f"(from {loaded.sources['rollout.max_staleness']}); {why}. It must be {off} "
                f"(--set rollout.{name}={off}), or max_staleness at least 1"
            )


def check_weight_transport(loaded: Loaded) -> None:
    """Refuse a way of weights that cannot work here; ConfigError names it, its value and what it must be."""
    # What is chosen here needs no check, and torch takes seconds to import.
    if loaded.config.trainer.weight_transport != "auto":
        from asyncrl.engine.lifecycle.transports import choose_way, choose_way_on_cluster

        if cluster_address(loaded.config) is None:
            choose_way(loaded.config)
        else:
            # Where the parts are is known only once the cluster is joined.
            choose_way_on_cluster(loaded.config, own_gpus=True, one_node=True)


def check_engine(loaded: Loaded) -> None:
    """Refuse what `batch` cannot do, and engines elsewhere without what they need; ConfigError names both."""
    config = loaded.config
    source = f"collector.engine (from {loaded.sources['collector.engine']}) is {config.collector.engine!r}"
    if config.collector.engine in ("vllm", "http") and config.model.path is None:
        raise ConfigError(f"{source}; such an engine loads a checkpoint from model.path, which is null")
    if config.collector.engine == "vllm" and find_spec("vllm") is None:
        raise ConfigError(f"{source}, and vLLM is not installed here: scripts/install vllm (docs/engines.md)")
    if config.trainer.router_replay and config.collector.engine in ("vllm", "http"):
        raise ConfigError(
            f"{source}, and trainer.router_replay (from {loaded.sources['trainer.router_replay']}) is true; only the "
            "native engine tells which experts it chose. The engine must be native or auto, or router_replay false"
        )
    if config.collector.engine == "batch":
        from asyncrl.engine.lifecycle.parts import native_only

        for path, (value, off) in native_only(config).items():
            raise ConfigError(
                f"{path} (from {loaded.sources[path]}) is {value!r}, and collector.engine is 'batch', which decodes "
                f"whole batches under one version by temperature alone. It must be {off}, or the engine another"
            )


def _check_extras(model: Model, extras: Sequence[str]) -> None:
    """Look at the model's class, which takes seconds to import, only for a task that attaches extras."""
    if extras:
        from asyncrl.engine.model.causal_lm import outline_model
        from asyncrl.engine.model.tokenizer import CharTokenizer
        from asyncrl.trainers.extras import check_takes

        check_takes(outline_model(model, vocab_size=CharTokenizer.vocab_size), extras)


def check_model_folder(loaded: Loaded) -> None:
    """Refuse a folder without the files of a checkpoint and its tokenizer; ConfigError names it."""
    path = loaded.config.model.path
    if path is None:
        return
    check_not_adapter(loaded)
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(
            f"model.path (from {loaded.sources['model.path']}) is {path!r}; "
            "it must be a folder with a Hugging Face checkpoint (config.json), or owner/name as on its Hub"
        )
    if not any((Path(path) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise ConfigError(
            f"model.path (from {loaded.sources['model.path']}) is {path!r}; it must hold a "
            "tokenizer too (tokenizer.json or tokenizer_config.json)"
        )


def check_not_adapter(loaded: Loaded) -> None:
    """Refuse a folder that holds an adapter alone; ConfigError says what to take instead."""
    folder = Path(loaded.config.model.path or "")
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path (from {loaded.sources['model.path']}) is {str(folder)!r}, which holds an adapter alone; "
            f"{instead_of_adapter(folder)}, on which a new adapter can be trained"
        )


def _check_lora(config: RunConfig) -> None:
    """Look at the model's layers, which takes seconds to import, only if an adapter is trained."""
    if config.lora.rank is not None:
        from asyncrl.engine.model.causal_lm import outline_model
        from asyncrl.engine.model.lora import check_installed, choose_layers
        from asyncrl.engine.model.tokenizer import CharTokenizer

        check_installed()
        choose_layers(outline_model(config.model, vocab_size=CharTokenizer.vocab_size), config.lora.target_modules)


def _check_router_replay(config: RunConfig) -> None:
    """Look for routers in the model, whose class takes seconds to import, only if their choices are replayed."""
    if config.trainer.router_replay:
        from asyncrl.engine.model.causal_lm import outline_model
        from asyncrl.engine.model.routers import routers_of
        from asyncrl.engine.model.tokenizer import CharTokenizer

        routers_of(outline_model(config.model, vocab_size=CharTokenizer.vocab_size))


def check_devices(loaded: Loaded, *sections: str) -> None:
    """Refuse a device that is not here; ConfigError names the option of the section that asks for it."""
    for section in sections:
        # On a cluster that is joined, other nodes may have what this one lacks.
        if getattr(loaded.config, section).device != "cuda" or cluster_address(loaded.config) is not None:
            continue
        import torch

        if not torch.cuda.device_count():
            path = f"{section}.device"
            raise ConfigError(
                f"{path} (from {loaded.sources[path]}) is 'cuda' and torch sees no GPU here; it must be auto or cpu"
            )
