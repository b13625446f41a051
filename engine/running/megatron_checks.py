"""What the Megatron backend needs, and what it refuses, before a run starts.

An option that it does not have is refused where somebody set it; its value in the default preset has no effect there.
"""

from collections.abc import Sequence
from importlib.util import find_spec

from asyncrl.configs import Loaded
from asyncrl.configs.load import DEFAULT_PRESET
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.running.harmless import RESUMED

_GUIDE = "docs/megatron.md"


def check_megatron(loaded: Loaded) -> None:
    """Refuse the backend where it is not installed, or beside options that it does not have. ConfigError says why."""
    if loaded.config.trainer.backend == "megatron" and not _is_installed():
        raise ConfigError(
            f"{_source(loaded)}, and megatron-core is not installed here: scripts/install megatron ({_GUIDE})"
        )
    check_megatron_options(loaded)


def check_megatron_options(loaded: Loaded) -> None:
    """Refuse options that the backend does not have, whether or not it is installed. ConfigError says why."""
    config, sources = loaded.config, loaded.sources
    trainer = config.trainer
    if trainer.backend != "megatron":
        return
    source = _source(loaded)
    for path, value, off, why in (
        ("lora.rank", config.lora.rank, None, "an adapter is added to layers of transformers"),
        (
            "trainer.offload_optimizer",
            trainer.offload_optimizer,
            False,
            "its optimizer's state is on the ranks' device",
        ),
        ("trainer.precision", trainer.precision, "autocast", "its weights have model.dtype, and masters in float32"),
        ("trainer.compile", trainer.compile, False, "its layers are not compiled"),
        ("trainer.sharding", trainer.sharding, "none", "its optimizer is divided over replicas by itself"),
        ("cluster.time_slicing", config.cluster.time_slicing, None, "its weights do not leave their device"),
        ("trainer.share_prompts", trainer.share_prompts, False, "each sample has positions of its own"),
    ):
        if value != off and sources[path] not in (DEFAULT_PRESET, RESUMED):
            raise ConfigError(
                f"{path} (from {sources[path]}) is {value!r} and {source}; {why}. {path} must be left out or "
                f"{'null' if off is None else off}, or the backend torch"
            )
    if config.run.runtime == "local" and trainer.ranks > 1:
        raise ConfigError(
            f"{source} and run.runtime 'local', in which all ranks are one process, and trainer.ranks (from "
            f"{sources['trainer.ranks']}) is {trainer.ranks}; each rank of Megatron is a process. ranks must be 1, or "
            "the runtime ray"
        )


def check_megatron_model(loaded: Loaded, extras: Sequence[str]) -> None:
    """Refuse a model that Megatron does not have, or that cannot be divided so, and a task's extra tensors."""
    config = loaded.config
    if config.trainer.backend != "megatron":
        return
    if extras:
        raise ConfigError(
            f"the task attaches the extra {extras[0]!r}, and trainer.backend (from "
            f"{loaded.sources['trainer.backend']}) is 'megatron', whose models take token ids alone; the backend must "
            "be torch"
        )
    from asyncrl.engine.model.causal_lm import outline_model
    from asyncrl.engine.model.checkpoint import read_config
    from asyncrl.engine.model.tokenizer import CharTokenizer
    from asyncrl.trainers.backends.megatron.architecture import check_model, check_split
    from asyncrl.trainers.backends.megatron.settings import Split

    trainer, path = config.trainer, config.model.path
    if path is None:
        architecture = outline_model(config.model, vocab_size=CharTokenizer.vocab_size).config
    else:
        architecture = read_config(path)
    check_model(architecture)
    split = Split(trainer.tensor_parallel, trainer.pipeline_parallel, trainer.expert_parallel)
    check_split(architecture, split, trainer.ranks)


def _source(loaded: Loaded) -> str:
    return f"trainer.backend (from {loaded.sources['trainer.backend']}) is 'megatron'"


def _is_installed() -> bool:
    try:
        return find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False
