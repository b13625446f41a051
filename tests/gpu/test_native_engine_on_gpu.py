"""The native engine on a GPU: the same contract, with CUDA graphs, without, and compiled."""

from typing import Any

import anyio
import pytest
import torch

from asyncrl.collectors.engines.base import Request, Result, Sampling
from asyncrl.collectors.engines.native import NativeEngine
from asyncrl.collectors.engines.settings import NativeSettings
from asyncrl.engine.aio.blocking import in_thread
from asyncrl.engine.testing.conformance.engine_contract import CONTRACT, EXACT, TEACHING, EngineTest, Stream
from asyncrl.engine.testing.conformance.engine_trials import FAMILIES, native_trial, serving, tiny_model

LIMIT_S = 300.0


def hold(tests: tuple[EngineTest, ...], family: str = "llama", **settings: Any) -> None:
    async def held() -> None:
        with anyio.fail_after(LIMIT_S):
            async with native_trial(family, device="cuda", length=256, **settings) as trial:
                for test in tests:
                    await test(trial)

    anyio.run(held)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("graphs", [True, False])
def test_the_contract_holds(graphs: bool) -> None:
    hold((*CONTRACT, *EXACT), graphs=graphs)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_of_each_family_are_the_teachers(family: str) -> None:
    hold(TEACHING, family)


@pytest.mark.timeout(400)
def test_logprobs_of_a_compiled_step_are_the_teachers() -> None:
    hold(TEACHING, compiled=True)


@pytest.mark.timeout(200)
def test_graphs_give_the_tokens_of_the_plain_step() -> None:
    def results(graphs: bool) -> list[Result]:
        settings = NativeSettings(16, 256, 2**28, graphs=graphs)
        engine = NativeEngine(tiny_model("llama", 0).to("cuda"), settings, blocking=in_thread)
        requests = [
            Request(f"r{n}", tuple(range(2, 4 + n % 9)), Sampling(5 + 3 * n, top_k=3 * (n % 2)), n) for n in range(40)
        ]
        streams = [Stream(engine, request) for request in requests]

        async def ask() -> None:
            async with serving(engine), anyio.create_task_group() as tasks:
                for stream in streams:
                    tasks.start_soon(stream.result)

        anyio.run(ask)
        return [stream.results[0] for stream in streams]

    plain, graphed = results(False), results(True)
    assert [result.finish for result in graphed] == ["length"] * 40
    for one, other in zip(plain, graphed, strict=True):
        # Another number of rows or window rounds otherwise, and may turn a draw that falls on an edge.
        same = next((i for i, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=True)) if a != b), None)
        assert one.logprobs[:same] == pytest.approx(other.logprobs[:same], abs=1e-4)
    differ = sum(one.token_ids != other.token_ids for one, other in zip(plain, graphed, strict=True))
    assert differ <= 2


def test_all_tensors_lie_on_the_gpu_within_the_budget() -> None:
    before = torch.cuda.memory_allocated()
    model = tiny_model("llama", 0).to("cuda")
    engine = NativeEngine(model, NativeSettings(4096, 256, 2**24, graphs=False), blocking=in_thread)
    assert 1 < engine.slots < 4096
    assert torch.cuda.memory_allocated() - before < 2**24 + 2**23
