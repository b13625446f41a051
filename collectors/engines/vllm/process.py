"""vLLM's engine process: how it is started, how it loads weights, and what it says of its cache."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import torch
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

from asyncrl.collectors.engines.in_flight import Pressure
from asyncrl.collectors.engines.swap import START
from asyncrl.collectors.engines.vllm.settings import VLLMSettings
from asyncrl.engine.errors import GenerationError

BACKEND = "asyncrl_file"
WORKER_EXTENSION = "asyncrl.collectors.engines.vllm.worker.WorkerExtension"


class CacheUse:
    """The share of the key-value cache in use, as vLLM last reported it; `heard` is told after each of its steps."""

    def __init__(self, heard: Callable[[Pressure], None]) -> None:
        self.share = 0.0
        self._preemptions = 0
        self._heard = heard

    def hear(self, share: float, *, waiting: int, preempted: int) -> None:
        """Take what vLLM says of one step."""
        self.share = share
        self._preemptions += preempted
        self._heard(Pressure(share, waiting, self._preemptions))

    def logger(self, config: Any, index: int = 0) -> StatLoggerBase:
        """Make the object that vLLM reports to after each step."""
        return _Logger(self)


class _Logger(StatLoggerBase):
    def __init__(self, use: CacheUse) -> None:
        self._use = use

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            self._use.hear(
                float(scheduler_stats.kv_cache_usage),
                waiting=scheduler_stats.num_waiting_reqs,
                preempted=0 if iteration_stats is None else iteration_stats.num_preempted_reqs,
            )

    def log_engine_initialized(self) -> None:
        pass


def start(settings: VLLMSettings, use: CacheUse) -> AsyncLLM:
    """Start vLLM's processes and return their front; blocks for ten seconds to minutes."""
    _prepare_environment(settings.threads)
    arguments: dict[str, Any] = {
        "model": settings.model_path,
        "dtype": settings.dtype,
        "max_model_len": settings.max_length,
        "max_num_seqs": settings.rows,
        "kv_cache_memory_bytes": settings.cache_bytes,
        "skip_tokenizer_init": True,
        "enforce_eager": not torch.cuda.is_available(),
        "worker_extension_cls": WORKER_EXTENSION,
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        # Of the distribution that was sampled; by default they are of the one before temperature and top-p.
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        **settings.options,
    }
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[use.logger])


async def prepare(llm: AsyncLLM) -> None:
    """Make the engine ready for requests and updates."""
    await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
    # Else the first tokens are stamped `default`.
    await llm.update_weight_version(str(START))
    # vLLM asks for them once, in the first request, which an abort would not find meanwhile.
    await llm.get_supported_tasks()


def _prepare_environment(threads: int) -> None:
    """Set what vLLM reads from the environment of its processes; what the user has set stays."""
    cores = sorted(os.sched_getaffinity(0))
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # By default vLLM leaves one core of a CPU alone: a third of the speed on two.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores[: threads or len(cores)])))


class FileLoader:
    """vLLM's weight-transfer session, with a file at the other end; the checkpoint's own file stands for None."""

    def __init__(self, llm: AsyncLLM, checkpoint: Path, timeout_s: float) -> None:
        self._llm = llm
        self._checkpoint = checkpoint
        self._timeout_s = timeout_s

    async def load(self, file: Path | None) -> None:
        """Load all weights of a file."""
        await self._call("start_weight_update")
        for path in [file] if file else sorted(self._checkpoint.glob("*.safetensors")):
            await self._call("update_weights", {"path": str(path)})
        await self._call("finish_weight_update")

    async def differences(self, file: Path | None) -> list[str]:
        """Return which of the model's modules do not compute with the weights of the file."""
        answers = await self._call("asyncrl_differing", str(file or self._checkpoint))
        return sorted({name for answer in answers for name in answer["differing"]})

    async def label(self, version: int) -> None:
        await self._llm.update_weight_version(str(version))

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            with anyio.fail_after(self._timeout_s):
                return await self._llm.collective_rpc(method, args=arguments)
        # The edge to vLLM's processes: whatever a worker raised comes back as it likes.
        except Exception as error:
            raise GenerationError(f"vLLM's {method} failed: {type(error).__name__}: {error}") from error
