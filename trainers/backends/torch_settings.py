"""What of a run's configuration the backend in PyTorch goes by."""

from dataclasses import dataclass

import torch

from asyncrl.configs import RunConfig
from asyncrl.trainers.loss.objective import Clip


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """How a backend computes log-probabilities, the loss and its updates.

    With a `reference_kl` over 0 a frozen copy of the model is kept (with an adapter, none is needed), and the loss adds
    that times the divergence from it. Importance weights of a proximal policy are truncated at `importance_cap`. Each
    sample takes a multiple of `align` positions of its row; with `share_prompts` those of one prompt may have one row.
    Logits of `chunk` positions exist at a time; None: as many as suit the device. With `recompute` layers keep their
    inputs alone, and a backward pass computes the rest again. With `router_replay` the policy's routers take the
    experts that rows bring. With `low_weights` the model's weights have the type that it computes in, and their masters
    keep their own; with `offload` masters and moments are in the host's memory. With `fused` layers and the loss are
    compiled. With `reshard` a layer of a sharded model is whole only while it runs, else until the update; None: as the
    GPU's memory has it.
    """

    temperature: float
    clip: Clip
    betas: tuple[float, float]
    weight_decay: float
    max_grad_norm: float
    packed: bool = False
    importance_cap: float = 2.0
    reference_kl: float = 0.0
    align: int = 1
    share_prompts: bool = False
    chunk: int | None = None
    decay_vectors: bool = True
    recompute: bool = False
    router_replay: bool = False
    low_weights: bool = False
    offload: bool = False
    fused: bool = False
    reshard: bool | None = None

    @classmethod
    def of(cls, config: RunConfig, device: torch.device) -> "TorchSettings":
        """Take what a run's configuration says of a rank on this device."""
        trainer = config.trainer
        return cls(
            temperature=config.rollout.temperature,
            clip=Clip(trainer.clip_low, trainer.clip_high, trainer.dual_clip),
            betas=(trainer.beta1, trainer.beta2),
            weight_decay=trainer.weight_decay,
            max_grad_norm=trainer.max_grad_norm,
            packed=trainer.packs,
            importance_cap=trainer.importance_cap,
            reference_kl=trainer.reference_kl,
            align=trainer.align,
            share_prompts=trainer.share_prompts,
            decay_vectors=trainer.decay_vectors,
            recompute=trainer.activation_checkpointing,
            router_replay=trainer.router_replay,
            low_weights=trainer.precision == "bf16_weights",
            offload=trainer.offload_optimizer,
            reshard=trainer.reshard_after_forward,
            # A router that replays experts reads them from outside of its layer.
            fused=trainer.compile and device.type == "cuda" and not trainer.router_replay,
        )
