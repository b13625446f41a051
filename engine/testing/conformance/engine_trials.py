"""Trials of the engines of this project: tiny models of each family, and engines that run."""

import copy
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import anyio
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.collectors.engines.native import NativeEngine
from asyncrl.collectors.engines.settings import NativeSettings
from asyncrl.engine.aio.blocking import in_place
from asyncrl.engine.testing.conformance.engine_contract import Trial, model_teacher
from asyncrl.engine.testing.scripted_engine import ScriptedEngine

VOCABULARY = 32
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 4},
    "gemma3_text": {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "mistral": {"sliding_window": 4},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


def tiny_model(family: str, version: int) -> Any:
    """Return a model whose weights are a version's own, large enough for each layer to matter."""
    return copy.deepcopy(_tiny_model(family, version))


@cache
def _tiny_model(family: str, version: int) -> Any:
    config = AutoConfig.for_model(family, **{**_SIZES, **FAMILIES[family]})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(version)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, 0.0, parameter.shape[-1] ** -0.5)
    return model


def text_of(tokens: Sequence[int]) -> str:
    """Return one letter per token."""
    return "".join(chr(ord("A") + token) for token in tokens)


@asynccontextmanager
async def serving(engine: Any) -> AsyncIterator[Any]:
    """Have an engine run for the length of the context."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.run)
        yield engine
        tasks.cancel_scope.cancel()


def native_engine(model: Any, *, rows: int = 4, length: int = 64, **more: Any) -> NativeEngine:
    """Return an engine in this thread, whose settings may be given."""
    settings = {"cache_bytes": 2**30, "burst": 4, **more}
    return NativeEngine(model, NativeSettings(rows, length, **settings), blocking=in_place, text=text_of)


@asynccontextmanager
async def native_trial(family: str = "llama", *, device: str = "cpu", **more: Any) -> AsyncIterator[Trial]:
    """Run a native engine of a family, whose even and odd versions differ in their weights."""
    async with serving(native_engine(tiny_model(family, 0).to(device), **more)) as engine:
        yield Trial(
            engine,
            states=[_tiny_model(family, version).state_dict() for version in range(2)],
            vocabulary=VOCABULARY,
            long_tokens=28,
            teacher=model_teacher(lambda version: _tiny_model(family, version % 2)),
            text=text_of,
        )


@asynccontextmanager
async def scripted_trial() -> AsyncIterator[Trial]:
    """Run a scripted engine of eight rows, with a millisecond per token."""
    states = [{"first": np.full(4, version), "last": np.full((2, 2), version)} for version in range(2)]
    async with serving(ScriptedEngine(states[0], token_s=0.001)) as engine:
        yield Trial(engine, states=states, vocabulary=VOCABULARY, long_tokens=40)
