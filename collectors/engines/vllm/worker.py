"""Inside vLLM's worker processes: weights come from a safetensors file, and are compared with it afterwards.

vLLM imports this module by name, for its `WorkerExtension`, before it makes the model. The import registers the
weight-transfer backend, and sees to it that the model's tables of rotary positions are exact.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from asyncrl.collectors.engines.weight_check import OpenFiles, differing_modules
from asyncrl.engine.model.vector_math import settle_vector_math

_BACKEND = "asyncrl_file"


@dataclass
class FileInit(WeightTransferInitInfo):
    """Nothing is set up: each update names its file."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """A safetensors file with all weights under Hugging Face names, on this host."""

    path: str


class FileTransfer(WeightTransferEngine[FileInit, FileUpdate]):
    """Loads layer by layer: on a CPU vLLM packs each layer's weights for its kernels, and frees the originals."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: FileInit) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: Any) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        # Not torch.accelerator.synchronize, as the base does: without a GPU it raises.
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def receive_weights(self, update_info: FileUpdate) -> None:
        try:
            self.model.load_weights(iter(load_file(update_info.path).items()))
        except BaseException:
            # Else the next reload, which brings the old weights back, would meet what this one left half done.
            finalize_layerwise_reload(self.model, self.model_config)
            raise

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _pack_tied_again(self.model)

    def shutdown(self) -> None:
        pass


def _pack_tied_again(model: torch.nn.Module) -> None:
    """Pack weights that keep their original a second time.

    vLLM's reload skips a head that is tied to the embedding, since no weight of its own comes; it would go on
    computing with the packed copy of the old embedding, and report success.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and weight is not None and weight.numel():
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


class WorkerExtension:
    """Methods that vLLM mixes into its worker."""

    model_runner: Any
    vllm_config: Any

    def asyncrl_about(self, path: str) -> dict[str, Any]:
        """Return how this engine was started, what model it serves, and whether it can read the file `path`."""
        transfer, model = self.vllm_config.weight_transfer_config, self.vllm_config.model_config
        text = model.hf_config.get_text_config()
        names = ("vocab_size", "hidden_size", "num_hidden_layers")
        shape = {name: getattr(text, name) for name in names if hasattr(text, name)}
        return {
            "backend": transfer.backend if transfer is not None else None,
            "logprobs_mode": model.logprobs_mode,
            "max_length": model.max_model_len,
            "model": {"architectures": model.hf_config.architectures, **shape},
            "sees": os.access(path, os.R_OK),
        }

    def asyncrl_differing(self, path: str) -> dict[str, Any]:
        """Compare the model with a safetensors file, or a folder of them.

        Return how many modules were compared, and the names of those that differ.
        """
        with OpenFiles(Path(path)) as weights:
            compared, differing = differing_modules(self.model_runner.get_model(), weights)
        return {"compared": compared, "differing": differing}


WeightTransferEngineFactory.register_engine(_BACKEND, FileTransfer)
settle_vector_math()
