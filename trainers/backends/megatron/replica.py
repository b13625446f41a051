"""A rank's part of a replica, with its gradients and its optimizer, and the collectives that bring the parts together.

Imported after `cpu.prepare`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from asyncrl.engine.errors import AsyncRLError
from asyncrl.trainers.backends.chosen import Scores
from asyncrl.trainers.backends.layout import Layout
from asyncrl.trainers.backends.megatron.adam import MOMENTS, Adam
from asyncrl.trainers.backends.megatron.architecture import transformer_config
from asyncrl.trainers.backends.megatron.model import Inputs, Model
from asyncrl.trainers.backends.megatron.passes import Outcome, Pass
from asyncrl.trainers.backends.megatron.settings import MegatronSettings, Split
from asyncrl.trainers.backends.megatron.vocabulary import Vocabulary
from asyncrl.trainers.backends.megatron.weights import RankWeights, once, whole_shapes
from asyncrl.trainers.backends.next_tokens import CPU_CHUNK, CUDA_CHUNK
from asyncrl.trainers.backends.packing import moved

Read = Callable[[str, str], torch.Tensor]


class Replica:
    """Built by all ranks at the same time. One per process: megatron's groups are the process's."""

    def __init__(
        self,
        config: Any,
        weights: Mapping[str, torch.Tensor],
        settings: MegatronSettings,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        split = settings.split
        _make_groups(split)
        self._settings, self._device, self._dtype = settings, device, dtype
        self._config = transformer_config(config, settings, dtype=dtype, device=device)
        # Norms are float32 until they are told otherwise.
        self._make: Callable[[], Model] = lambda: Model(config, settings, megatron_config=self._config).to(
            device, dtype
        )
        self._model = self._make()
        self._wrapped = DistributedDataParallel(
            self._config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
            self._model,
        )
        self._adam = Adam(self._wrapped, settings, dtype=dtype)
        self.shapes = whole_shapes(config)
        self._weights = RankWeights(self._model, config, self.shapes)
        # The ranks that together have each weight once: all tensor parts, stages and experts.
        self._group = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
        self._weights.check_whole(self._group)
        self.load(lambda _, name: weights[name])
        self._reference: Model | None = None

    def load(self, read: Read, *, updates: int = 0) -> None:
        """Take whole weights, which `read` returns by `weights` and a name, and after `updates` the moments as well."""
        for parameter, value in self._weights.values(partial(read, "weights")):
            with torch.no_grad():
                parameter.copy_(value)
            # Masters are not rounded to the type that the model computes in.
            self._adam.put("weights", parameter, value)
        self._adam.resume(updates)
        for key in MOMENTS if updates else ():
            for parameter, value in self._weights.values(partial(read, key)):
                self._adam.put(key, parameter, value)

    def load_reference(self, read: Callable[[str], torch.Tensor]) -> None:
        """Take the reference's whole weights by name."""
        twins = self._reference_twins()
        for parameter, value in self._weights.values(read):
            with torch.no_grad():
                twins[parameter].copy_(value)

    def freeze_reference(self) -> None:
        """Give the reference the current weights."""
        if self._reference is None:
            self._reference = self._make().requires_grad_(requires_grad=False)
        with torch.no_grad():
            for ours, theirs in self._reference_twins().items():
                theirs.copy_(ours)

    def run(self, passes: Sequence[Pass], *, reference: bool = False) -> list[torch.Tensor]:
        """Have micro-batches pass through the stages, and return what each came to, in float64, on every stage.

        Gradients are added where they are enabled.
        """
        queue = iter(passes)
        self._model.forget_experts()

        def step(_: Any, model: Any) -> Any:
            one = next(queue)
            return model(Inputs.of(one.layout, one.experts, self._device)), partial(_finished, one.finish)

        rows, length = passes[0].layout.ids.shape
        found: list[torch.Tensor] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=None,
            model=[self._reference if reference else self._wrapped],
            num_microbatches=len(passes),
            seq_length=length,
            micro_batch_size=rows,
            forward_only=not torch.is_grad_enabled(),
        )
        if self._settings.split.pipeline == 1:
            return found
        if not found:
            found = [torch.empty(one.size, dtype=torch.float64, device=self._device) for one in passes]
        joined = torch.cat(found)
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(joined, src=last, group=parallel_state.get_pipeline_model_parallel_group())
        return list(torch.split(joined, [one.size for one in passes]))

    def scores(
        self, hidden: torch.Tensor, layout: Layout, index: torch.Tensor, tokens: torch.Tensor, *, reference: bool
    ) -> Scores:
        """Return the scores of `tokens` (N) after the places `index` (N) of a layout, counted row by row."""
        rows, length = layout.ids.shape
        place = moved(index % length * rows + index // length, self._device)
        model = self._reference if reference else self._model
        assert model is not None, "a reference was frozen"
        columns = model.vocab_size // self._settings.split.tensor
        part = Vocabulary(
            first=columns * parallel_state.get_tensor_model_parallel_rank(),
            size=model.real_vocabulary,
            group=parallel_state.get_tensor_model_parallel_group(),
        )
        elements = CUDA_CHUNK if hidden.is_cuda else CPU_CHUNK
        return part.scores(
            model.logits,
            hidden.flatten(0, 1).index_select(0, place),
            moved(tokens, self._device),
            temperature=self._settings.temperature,
            chunk=self._settings.chunk or max(1, elements // columns),
        )

    def sum_gradients(self) -> None:
        """Sum gradients over all ranks that have a part of them: of data, of tied embeddings, of norms of heads."""
        finalize_model_grads([self._wrapped])

    def step(self, *, learning_rate: float) -> float:
        """Update the weights, and forget the gradients; see `Adam.step`."""
        try:
            return self._adam.step(learning_rate=learning_rate)
        finally:
            self._wrapped.zero_grad_buffer()
            self._adam.forget_gradients()

    def reset_optimizer(self) -> None:
        self._adam.reset()

    @property
    def updates(self) -> int:
        """How many updates the moments have had."""
        return self._adam.updates

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole weights by name; all ranks of the replica call."""
        return self._weights.whole(self._group, dtype=self._dtype)

    def masters(self, key: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole float32 tensors by name, the `weights` that are updated or one of MOMENTS; all ranks call."""
        return self._weights.whole(None, partial(self._adam.get, key), dtype=torch.float32)

    def reference(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the reference's whole weights by name; all ranks of the replica call."""
        twins = self._reference_twins()
        return self._weights.whole(
            self._group, lambda ours: None if once(ours) is None else twins[ours], dtype=self._dtype
        )

    def _reference_twins(self) -> dict[torch.nn.Parameter, torch.nn.Parameter]:
        """Return the reference's weight for each of the model's."""
        assert self._reference is not None, "a reference was frozen"
        return dict(zip(self._model.parameters(), self._reference.parameters(), strict=True))


def _make_groups(split: Split) -> None:
    """Make megatron's process groups, which are one set per process: each keeps threads and connections."""
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=split.tensor,
            pipeline_model_parallel_size=split.pipeline,
            expert_model_parallel_size=split.expert,
            create_gloo_process_groups=False,
        )
        return
    made = Split(
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
    )
    if made != split:
        raise AsyncRLError(f"this process has megatron's groups for {made}, and {split} needs a process of its own")


def _finished(after: Callable[[torch.Tensor], Outcome], hidden: torch.Tensor) -> Any:
    """Answer as megatron's schedules want it, without tokens that they would divide by."""
    loss, result = after(hidden)
    return loss, torch.zeros((), dtype=torch.int, device=hidden.device), result.detach().double()
