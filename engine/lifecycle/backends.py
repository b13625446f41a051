"""The backend of a rank, by `trainer.backend`, and where it computes."""

from collections.abc import Sequence
from typing import Any

import torch

from asyncrl.configs import RunConfig
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.model.device import choose_device
from asyncrl.trainers.backends.alike import Alike
from asyncrl.trainers.backends.base import Backend
from asyncrl.trainers.backends.sharded import Shards
from asyncrl.trainers.backends.torch_backend import TorchBackend
from asyncrl.trainers.backends.torch_settings import TorchSettings
from asyncrl.trainers.extras import check_takes


def rank_device(config: RunConfig, place: int) -> torch.device:
    """Return the device of the rank at `place` of the run's processes."""
    return choose_device(config.trainer.device, place)


def takes_part(config: RunConfig) -> bool:
    """Return whether a rank takes its part of weights in the host's memory: whole they may not fit on its device."""
    return config.trainer.backend == "megatron" or config.trainer.is_sharded


def build_backend(
    config: RunConfig,
    model: Any,
    *,
    pad_id: int,
    dtype: torch.dtype,
    device: torch.device,
    extras: Sequence[str],
    shards: Shards | None = None,
) -> Backend:
    """Return the run's backend for a model from `rank_model`. With `shards` all ranks build at the same time.

    ConfigError if it does not take one of a task's `extras`, or does not keep samples apart.
    """
    if config.trainer.backend == "megatron":
        return megatron_backend(config, model, pad_id=pad_id, dtype=dtype, device=device)
    check_takes(model, extras)
    trainer = config.trainer
    if extras and shards is not None:
        raise ConfigError(
            f"trainer.sharding is {trainer.sharding}, and samples bring {', '.join(extras)}; a model may skip layers "
            "for samples without such extras, for which other ranks would wait, so sharding must be none"
        )
    # A model that needs a task's extras cannot be tried without them.
    alike = None if extras else Alike(model, temperature=config.rollout.temperature)
    backend = torch_backend(config, model, pad_id=pad_id, dtype=dtype, shards=shards)
    if alike is not None:
        alike.check(backend, packed=trainer.packs, align=trainer.align, dtype=dtype)
    return backend


def torch_backend(
    config: RunConfig, model: Any, *, pad_id: int, dtype: torch.dtype, shards: Shards | None = None
) -> TorchBackend:
    """Return the PyTorch backend around a model; it computes in `dtype`, on the model's device or the shards'."""
    device = next(model.parameters()).device if shards is None else shards.device
    settings = TorchSettings.of(config, device)
    return TorchBackend(model, settings, pad_id=pad_id, compute_dtype=dtype, shards=shards)


def megatron_backend(
    config: RunConfig, model: Any, *, pad_id: int, dtype: torch.dtype, device: torch.device
) -> Backend:
    """Return this rank's part of a model, in Megatron; the ranks have met, and all build theirs at the same time."""
    from asyncrl.trainers.backends.megatron.backend import MegatronBackend
    from asyncrl.trainers.backends.megatron.settings import MegatronSettings, Split
    from asyncrl.trainers.loss.objective import Clip

    trainer = config.trainer
    settings = MegatronSettings(
        temperature=config.rollout.temperature,
        clip=Clip(trainer.clip_low, trainer.clip_high, trainer.dual_clip),
        betas=(trainer.beta1, trainer.beta2),
        weight_decay=trainer.weight_decay,
        max_grad_norm=trainer.max_grad_norm,
        split=Split(trainer.tensor_parallel, trainer.pipeline_parallel, trainer.expert_parallel),
        packed=trainer.packs,
        importance_cap=trainer.importance_cap,
        reference_kl=trainer.reference_kl,
        align=trainer.align,
        decay_vectors=trainer.decay_vectors,
        recompute=trainer.activation_checkpointing,
        router_replay=trainer.router_replay,
    )
    weights = model.state_dict()
    return MegatronBackend(model.config, weights, settings, pad_id=pad_id, device=device, dtype=dtype)
