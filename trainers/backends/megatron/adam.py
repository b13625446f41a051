"""AdamW over megatron's DistributedOptimizer: each data parallel rank updates a range of every weight.

A weight's range is of its elements in one row. Without Transformer Engine and Apex megatron does not restore the step
that AdamW corrects its moments by, so states are read and written here.
"""

import math
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, ParamGroupOverride, ParamKey, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamPredicate

from asyncrl.engine.errors import ConfigError
from asyncrl.trainers.backends.megatron.settings import MegatronSettings

MOMENTS = ("exp_avg", "exp_avg_sq")


class Adam:
    """Updates the weights that DDP wraps; masters and moments are float32."""

    def __init__(self, wrapped: Any, settings: MegatronSettings, *, dtype: torch.dtype) -> None:
        config = OptimizerConfig(
            optimizer="adam",
            lr=0.0,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            clip_grad=settings.max_grad_norm,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        )
        vectors = ParamKey(predicate=ParamPredicate(name="vectors", fn=lambda parameter: parameter.ndim < 2))
        overrides = {} if settings.decay_vectors else {vectors: ParamGroupOverride(wd_mult=0.0)}
        self._optimizer = get_megatron_optimizer(
            config, [wrapped], config_overrides=overrides, use_gloo_process_groups=False
        )
        # Of each weight that this rank has a range of, whose optimizer that is.
        self._owners = {
            parameter: one for one in self._optimizer.chained_optimizers for parameter in one.model_param_gbuf_map
        }
        for one in self._owners.values():
            if type(one.optimizer) is not torch.optim.AdamW:
                raise ConfigError(
                    f"trainer.backend megatron: megatron-core has taken {type(one.optimizer).__module__}'s AdamW in "
                    "place of torch's, and asyncrl would restore its steps wrongly. Install asyncrl where Transformer "
                    "Engine and Apex cannot be imported (scripts/install megatron)"
                )
        self._weight_decay = settings.weight_decay
        self.updates = 0

    def step(self, *, learning_rate: float) -> float:
        """Clip the summed gradients, update the weights on all ranks, and return the norm before clipping.

        FloatingPointError for a norm that is not finite; nothing is changed then.
        """
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient's norm is {norm}; the weights were left as they are")
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
            # megatron leaves it to a scheduler of its own to apply this factor.
            group["weight_decay"] = self._weight_decay * group["wd_mult"]
        self._optimizer.step()
        self.updates += 1
        return norm

    def forget_gradients(self) -> None:
        self._optimizer.zero_grad()

    def reset(self) -> None:
        """Forget moments and steps."""
        for one in self._optimizer.chained_optimizers:
            one.optimizer.state.clear()
        self.updates = 0

    def resume(self, updates: int) -> None:
        """Have moments, for `put` to fill, as after so many updates."""
        self.reset()
        self.updates = updates
        for parameter in self._owners if updates else ():
            master = self._master(parameter)
            # A tensor of the host, as AdamW has it.
            self._states(parameter)[master] = {
                "step": torch.tensor(float(updates)),
                **{key: torch.zeros_like(master) for key in MOMENTS},
            }

    def get(self, key: str, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Return a weight's master or one of its moments, 0 out of this rank's range; None if it has no range."""
        if parameter not in self._owners:
            return None
        found = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        found.view(-1)[self._range(parameter)] = self._value(key, parameter).detach()
        return found

    @torch.no_grad()
    def put(self, key: str, parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
        """Set this rank's range of a weight's master, or of one of its moments, from a value of the weight's shape."""
        if parameter in self._owners:
            self._value(key, parameter).copy_(value.view(-1)[self._range(parameter)])

    def _value(self, key: str, parameter: torch.nn.Parameter) -> torch.Tensor:
        master = self._master(parameter)
        return master if key == "weights" else self._states(parameter)[master][key]

    def _states(self, parameter: torch.nn.Parameter) -> Any:
        return self._owners[parameter].optimizer.state

    def _master(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        one = self._owners[parameter]
        group, place = one.model_param_group_index_map[parameter]
        return one.optimizer.param_groups[group]["params"][place]  # type: ignore[no-any-return]

    def _range(self, parameter: torch.nn.Parameter) -> slice:
        found = self._owners[parameter]._get_model_param_range_map(parameter)["param"]
        return slice(found.start, found.end)
