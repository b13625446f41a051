"""How a Megatron backend splits the model, and how it computes log-probabilities, the loss and its updates."""

from dataclasses import dataclass

from asyncrl.trainers.loss.objective import Clip


@dataclass(frozen=True, slots=True)
class Split:
    """Over how many ranks a replica's tensors, layers and experts are split.

    Of R ranks R / (tensor * pipeline) are data parallel, and `expert` divides that. Ranks are numbered in megatron's
    order tp-cp-ep-dp-pp: of 8 ranks with tensor 2 and pipeline 2, ranks 0, 1, 4 and 5 have one replica.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1


@dataclass(frozen=True, slots=True)
class MegatronSettings:
    """As the settings of the PyTorch backend, for those that both have.

    With a `reference_kl` over 0 a frozen copy of the model is kept, and the loss adds that times the divergence from
    it. Each sample takes a multiple of `align` positions of its row. Logits of `chunk` positions exist at a time;
    None: as many as suit the device. With `recompute` layers keep their inputs alone. With `router_replay`
    the routers take the experts that rows bring.
    """

    temperature: float
    clip: Clip
    betas: tuple[float, float]
    weight_decay: float
    max_grad_norm: float
    split: Split = Split()
    packed: bool = False
    importance_cap: float = 2.0
    reference_kl: float = 0.0
    align: int = 1
    chunk: int | None = None
    decay_vectors: bool = True
    recompute: bool = False
    router_replay: bool = False
