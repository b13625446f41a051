"""Tests on the real megatron-core: `.venv-megatron/bin/pytest -n 0 tests/megatron`, after `scripts/install megatron`;
skipped elsewhere. Processes of ranks live as long as the session, because each takes seconds to import megatron.
"""

import importlib.util
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.trainers.backends.base import Rows, StepSums
from asyncrl.trainers.backends.megatron.settings import MegatronSettings, Split
from asyncrl.trainers.backends.torch_backend import TorchBackend
from asyncrl.trainers.backends.torch_settings import TorchSettings
from asyncrl.trainers.loss.objective import Clip
from asyncrl.trainers.reducer import MeetingPoint

HERE = Path(__file__).parent
VOCABULARY = 37
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 16,
}
FAMILIES = ("llama", "llama3", "tied", "qwen2", "qwen3", "qwen3_moe")
TOTAL = 20
WHOLE = Split()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in (item for item in items if item.path.is_relative_to(HERE)):
        item.add_marker(pytest.mark.timeout(400))  # The first one starts processes, which import megatron.
        if importlib.util.find_spec("megatron") is None:
            item.add_marker(pytest.mark.skip(reason="megatron-core is not installed"))


class World:
    """Processes of ranks that have joined one process group. An error of one is raised here."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.whole = True
        self._point = MeetingPoint()
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(HERE / "rank_process.py"), str(rank), str(ranks), self._point.address],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for rank in range(ranks)
        ]

    def each(self, method: str, *arguments: Any, **named: Any) -> list[Any]:
        """Call a method with the same arguments on all ranks, and return their answers."""
        return self.apart(method, [arguments] * self.ranks, **named)

    def apart(self, method: str, arguments: Sequence[tuple[Any, ...]], **named: Any) -> list[Any]:
        """Call a method with the arguments of each rank."""
        self.whole = False  # If this test ends before its answers are here, the next one would get them.
        for process, own in zip(self._processes, arguments, strict=True):
            assert process.stdin is not None
            pickle.dump((method, (own, named)), process.stdin)
            process.stdin.flush()
        answers = [pickle.load(process.stdout) for process in self._processes if process.stdout is not None]
        self.whole = True
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def shares(self, batches: Sequence[Rows], split: Split) -> list[list[Rows]]:
        """Return each rank's micro-batches: data parallel ranks take turns, by megatron's order of ranks."""
        replicas = self.ranks // (split.tensor * split.pipeline)
        return [list(batches[rank // split.tensor % replicas :: replicas]) for rank in range(self.ranks)]

    def update(
        self, batches: Sequence[Rows], split: Split, *, learning_rate: float, total: int = TOTAL
    ) -> tuple[list[list[StepSums]], list[float]]:
        """Take an update; return every rank's sums, micro-batch by micro-batch, and the norms that the ranks saw."""
        mine = self.shares(batches, split)
        found = [self.apart("accumulate", [(own[i], total) for own in mine]) for i in range(len(mine[0]))]
        sums = [[one.read() for one in of_ranks] for of_ranks in found]
        gradients = self.each("gradients")
        return sums, self.apart("apply", [(one,) for one in gradients], learning_rate=learning_rate)

    def stop(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            if not self.whole:
                process.kill()
            with suppress(OSError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], World]]:
    """Return the processes of so many ranks, started once."""
    worlds: dict[int, World] = {}
    try:

        def of(ranks: int) -> World:
            if ranks not in worlds or not worlds[ranks].whole:
                if ranks in worlds:
                    worlds[ranks].stop()
                worlds[ranks] = World(ranks)
            return worlds[ranks]

        yield of
    finally:
        for one in worlds.values():
            one.stop()


@pytest.fixture
def model() -> Callable[..., Any]:
    """Return a random model of a family, whose norms and biases are not what they begin with."""
    return make_model


def make_model(family: str, **changes: Any) -> Any:
    from transformers import (
        AutoModelForCausalLM,
        LlamaConfig,
        Qwen2Config,
        Qwen3Config,
        Qwen3MoeConfig,
    )

    sizes = {**SIZES, **changes}
    config: Any
    if family == "qwen2":
        config = Qwen2Config(**sizes)
    elif family == "qwen3":
        config = Qwen3Config(**{"head_dim": 16, **sizes})
    elif family == "qwen3_moe":
        mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
        config = Qwen3MoeConfig(**{"head_dim": 16, **mixture, **sizes})
    else:
        own: dict[str, Any] = {"rope_parameters": LLAMA3} if family == "llama3" else {}
        config = LlamaConfig(**{**own, "tie_word_embeddings": family == "tied", **sizes})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim < 2 else 0.1))
    return model.eval()


@pytest.fixture
def batches() -> list[Rows]:
    return make_batches()


def make_batches() -> list[Rows]:
    """Four micro-batches of samples of unequal lengths, with all that the loss reads."""
    random = torch.Generator().manual_seed(5)

    def rows(lengths: Sequence[tuple[int, int]]) -> Rows:
        responses = [length - prompt for length, prompt in lengths]
        return Rows(
            tokens=[torch.randint(VOCABULARY, (length,), generator=random) for length, _ in lengths],
            logprobs=[-4 + torch.rand(n, generator=random) for n in responses],
            prompt_tokens=[prompt for _, prompt in lengths],
            advantages=[1.5 - i for i in range(len(lengths))],
            withheld=[i % 2 for i in range(len(lengths))],
            filler=False,
            scales=[1.0 + i for i in range(len(lengths))],
        )

    return [rows([(9, 3), (5, 2), (12, 4)]), rows([(7, 1), (8, 6)]), rows([(6, 5)]), rows([(4, 2), (11, 5), (3, 1)])]


def settings(split: Split = WHOLE, **changes: Any) -> MegatronSettings:
    options: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1, "max_grad_norm": 0.5, **changes}
    return MegatronSettings(0.7, Clip(0.2, 0.3, 3.0), split=split, **options)


@pytest.fixture
def make_settings() -> Callable[..., MegatronSettings]:
    return settings


@pytest.fixture
def torch_backend() -> Callable[..., TorchBackend]:
    """Return the PyTorch backend with the same settings."""

    def make(model: Any, of: MegatronSettings) -> TorchBackend:
        own = TorchSettings(
            of.temperature,
            of.clip,
            of.betas,
            of.weight_decay,
            of.max_grad_norm,
            packed=of.packed,
            reference_kl=of.reference_kl,
            decay_vectors=of.decay_vectors,
        )
        return TorchBackend(model, own, pad_id=0)

    return make
