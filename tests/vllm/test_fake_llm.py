"""The vLLM engine before a fake AsyncLLM: the contract in seconds, with vLLM's own types but none of its processes."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.collectors.engines.base import Chunk, Request, Result, Sampling
from asyncrl.collectors.generators.engine_generator import EngineGenerator
from asyncrl.engine.errors import VersionError
from asyncrl.engine.testing.conformance.engine_contract import CONTRACT, Stream, Trial, reading
from asyncrl.engine.testing.conformance.engine_trials import VOCABULARY, serving
from asyncrl.engine.testing.scripted_engine import ScriptedEngine

LIMIT_S = 60.0
Hold = Callable[[Callable[[Trial, "FakeLLM"], Awaitable[None]]], None]


def state(version: int) -> dict[str, torch.Tensor]:
    return {"lm_head.weight": torch.full((8, 2), float(version)), "norm.weight": torch.full((4,), float(version))}


class FakeLLM:
    """What VLLMEngine calls of AsyncLLM, before a scripted engine whose versions it labels as it is told."""

    errored = False
    refuses_reset = False

    def __init__(self) -> None:
        self.salts: list[tuple[str, str]] = []
        self._paused = False
        self._engine = ScriptedEngine(state(0), rows=8, token_s=0.001)
        self._labels = {0: "default"}
        self._file: Path | None = None

    async def run(self) -> None:
        await self._engine.run()

    async def init_weight_transfer_engine(self, _: Any) -> None:
        pass

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def update_weight_version(self, label: str) -> None:
        if self._file is None:
            self._labels[0] = label
            return
        # vLLM stamps by the label of the moment, so that only a pause tells which weights made a token.
        assert self._paused
        version = (await self._engine.stats()).version + 1
        self._labels[version] = label
        await self._engine.update_weights(version, load_file(self._file))

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == "update_weights":
            self._file = Path(args[0]["path"])
        return [{"compared": 2, "differing": []}]

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert not clear_cache
        self._paused = True
        await self._engine.pause({"keep": "keep", "wait": "drain", "abort": "abort"}[mode])  # type: ignore[arg-type]

    async def resume_generation(self) -> None:
        self._paused = False
        await self._engine.resume()

    async def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        await self._engine.reset_cache()
        return reset_running_requests and not self.refuses_reset

    async def abort(self, name: str) -> None:
        await self._engine.abort([name])

    async def generate(self, prompt: Any, parameters: Any, name: str) -> AsyncGenerator[Any, None]:
        self.salts.append((prompt["cache_salt"], self._labels[(await self._engine.stats()).version]))
        sampling = Sampling(parameters.max_tokens, stop_ids=tuple(parameters.stop_token_ids))
        asked = Request(name, tuple(prompt["prompt_token_ids"]), sampling, seed=0)
        async with aclosing(self._engine.generate(asked)) as items:
            async for item in items:
                yield self._output(item)

    def _output(self, item: Chunk | Result) -> Any:
        ended = isinstance(item, Result)
        ids, values = ((), ()) if isinstance(item, Result) else (item.token_ids, item.logprobs)
        logprobs = [{token: SimpleNamespace(logprob=value)} for token, value in zip(ids, values, strict=True)]
        spans = [(self._labels[v], first, end) for v, first, end in item.spans] if isinstance(item, Result) else []
        completion = SimpleNamespace(
            token_ids=list(ids),
            logprobs=logprobs,
            finish_reason=item.finish if isinstance(item, Result) else None,
            weight_versions=[SimpleNamespace(version=v, start=first, end=end) for v, first, end in spans],
        )
        return SimpleNamespace(outputs=[completion], finished=ended)

    def shutdown(self) -> None:
        pass


@pytest.fixture
def held(tmp_path: Path) -> Hold:
    """Return what runs a test before a fake that has started."""
    from asyncrl.collectors.engines.vllm.engine import VLLMEngine
    from asyncrl.collectors.engines.vllm.settings import VLLMSettings

    save_file(state(0), tmp_path / "model.safetensors")
    settings = VLLMSettings(str(tmp_path), "float32", max_length=1024, rows=8, weights_folder=str(tmp_path))

    def hold(test: Callable[[Trial, FakeLLM], Awaitable[None]]) -> None:
        async def run() -> None:
            llm: Any = FakeLLM()
            with anyio.fail_after(LIMIT_S):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(llm.run)
                    async with serving(VLLMEngine(settings, start=lambda *_: llm)) as engine:
                        trial = Trial(engine, [state(0), state(1)], VOCABULARY, long_tokens=60)
                        await Stream(engine, trial.request(2)).read()
                        await test(trial, llm)
                    tasks.cancel_scope.cancel()

        anyio.run(run)
        assert not list(tmp_path.glob("asyncrl-*"))

    return hold


def test_contract(held: Hold) -> None:
    async def test(trial: Trial, _: FakeLLM) -> None:
        for each in CONTRACT:
            await each(trial)

    held(test)


def test_what_was_cached_of_a_prompt_is_never_found_under_other_weights(held: Hold) -> None:
    """vLLM's update alone leaves blocks of the old weights in the prefix cache: each version has a salt of its own."""

    async def test(trial: Trial, llm: FakeLLM) -> None:
        for _ in range(3):
            await trial.run(trial.request(4, group="same"))
            await trial.update()
        versions_of: dict[str, set[str]] = {}
        for salt, version in llm.salts:
            versions_of.setdefault(salt, set()).add(version)
        assert sorted(versions_of.values(), key=min) == [{"0"}, {"1"}, {"2"}]

    held(test)


def test_a_cache_that_is_not_emptied_is_an_error_and_changes_nothing(held: Hold) -> None:
    """CASE-H5: vLLM answers a reset of the cache with False, and goes on."""

    async def test(trial: Trial, llm: FakeLLM) -> None:
        llm.refuses_reset = True
        async with reading(trial, trial.long_request()) as (stream,):
            with pytest.raises(VersionError, match="refused to empty its cache"):
                await trial.update(cache="recompute")
            with pytest.raises(VersionError, match="refused to empty its cache"):
                await trial.engine.reset_cache()
        assert stream.results[0].spans == ((0, 0, trial.long_tokens),)
        llm.refuses_reset = False
        assert await trial.update(cache="recompute") == 1

    held(test)


def test_updates_that_abort_end_what_is_let_in_while_they_do(held: Hold) -> None:
    """vLLM keeps what comes during a pause until its end, which waited for that: the engine stood still."""

    async def test(trial: Trial, _: FakeLLM) -> None:
        generator = EngineGenerator(trial.engine, Sampling(60), on_update="continue")

        async def converse(number: int) -> None:
            for turn in range(1000):
                tokens = 1 + (7 * number + turn) % 12
                request = generator.request((1, 2, 3), turn, max_new_tokens=tokens, temperature=1.0)
                await generator.respond(request, lambda: None)

        async with anyio.create_task_group() as tasks:
            for number in range(32):
                tasks.start_soon(converse, number)
            for version in range(1, 30):
                await generator.update_weights(version, state(version))
                await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()

    held(test)


def test_a_full_cache_holds_requests_back(tmp_path: Path) -> None:
    from asyncrl.collectors.engines.vllm.engine import VLLMEngine
    from asyncrl.collectors.engines.vllm.process import CacheUse
    from asyncrl.collectors.engines.vllm.settings import VLLMSettings

    save_file(state(0), tmp_path / "model.safetensors")
    settings = VLLMSettings(str(tmp_path), "float32", max_length=1024, rows=8, weights_folder=str(tmp_path))
    uses: list[CacheUse] = []

    async def run() -> None:
        llm: Any = FakeLLM()

        def start(_: VLLMSettings, use: CacheUse) -> Any:
            uses.append(use)
            return llm

        def said(share: float, preempted: int) -> None:
            scheduler = SimpleNamespace(kv_cache_usage=share, num_waiting_reqs=0)
            uses[0].logger(None).record(scheduler, SimpleNamespace(num_preempted_reqs=preempted))

        with anyio.fail_after(LIMIT_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(llm.run)
                async with serving(VLLMEngine(settings, start=start)) as engine:
                    trial = Trial(engine, [state(0), state(1)], VOCABULARY, long_tokens=400)
                    async with anyio.create_task_group() as readers:
                        for _ in range(12):
                            readers.start_soon(trial.run, trial.long_request())
                        await trial.until(lambda stats: stats.running == 8)
                        said(0.5, 1)
                        assert (await engine.stats()).cache_used == 0.5
                        await trial.engine.abort(["r0", "r1", "r2"])
                        await trial.until(lambda stats: stats.running == 6)
                        said(0.5, 0)
                        await anyio.sleep(0.15)
                        said(0.5, 0)
                        await trial.until(lambda stats: stats.running == 7)
                        await trial.engine.abort()
                tasks.cancel_scope.cancel()

    anyio.run(run)
