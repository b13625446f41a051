"""vLLM in this process: the contract, with a tied and an untied model, and updates that do not take."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncrl.collectors.engines.base import Request, Result, Sampling
from asyncrl.engine.errors import VersionError
from asyncrl.engine.testing.conformance.engine_contract import CONTRACT, TEACHING, EngineTest, Stream, Trial, check_near
from asyncrl.engine.testing.conformance.engine_trials import serving

from .conftest import MAX_LENGTH, Served, served, trial_of

FORGETFUL = """
from asyncrl.collectors.engines.vllm import worker

pack = worker._pack_tied_again

class Forgetful(worker.WorkerExtension):
    def off_in_tables(self):
        modules = [module for module in self.model_runner.get_model().modules() if hasattr(module, "cos_sin_cache")]
        return [(m.cos_sin_cache - m._compute_cos_sin_cache()).abs().max().item() for m in modules]

    def forget_the_head(self, forget):
        worker._pack_tied_again = (lambda model: None) if forget else pack
"""


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def engine(
    request: pytest.FixtureRequest, checkpoint: Callable[[bool], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    from asyncrl.collectors.engines.vllm.engine import VLLMEngine
    from asyncrl.collectors.engines.vllm.settings import VLLMSettings

    tied = request.param
    modules = tmp_path_factory.mktemp("modules")
    (modules / "forgetful.py").write_text(FORGETFUL)
    with pytest.MonkeyPatch.context() as patch:
        # vLLM's workers, forked from here, import it by name.
        patch.syspath_prepend(str(modules))
        patch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
        settings = VLLMSettings(
            str(checkpoint(tied)),
            dtype="float32",
            max_length=MAX_LENGTH,
            rows=8,
            cache_bytes=2**27,
            options={"worker_extension_cls": "forgetful.Forgetful"},
        )

        @asynccontextmanager
        async def trial() -> AsyncIterator[Trial]:
            async with serving(VLLMEngine(settings, text=lambda ids: "".join(chr(65 + t) for t in ids))) as running:
                made = trial_of(running, tied, quiet_s=0.3)
                with anyio.fail_after(280):
                    stream = Stream(running, made.request(2))
                    await stream.read()
                assert stream.results[0].finish == "length", stream.results
                yield made

        with served(trial, tied) as ready:
            yield ready


@pytest.mark.parametrize("engine", [False], ids=["untied"], indirect=True)
@pytest.mark.parametrize("test", CONTRACT, ids=lambda test: test.__name__)
def test_contract(engine: Served, test: EngineTest) -> None:
    engine.hold(test)


@pytest.mark.parametrize("test", TEACHING, ids=lambda test: test.__name__)
def test_log_probabilities(engine: Served, test: EngineTest) -> None:
    engine.hold(test)


def test_a_seed_gives_the_same_tokens_with_a_stream_and_without(engine: Served) -> None:
    async def run(trial: Trial) -> None:
        request = Request("seeded", (3, 4, 5), Sampling(40), seed=7)
        silent = Request("silent", (3, 4, 5), Sampling(40), seed=7, stream=False)
        first, second = await trial.run(request), await trial.run(silent)
        assert first.token_ids == second.token_ids
        other = await trial.run(Request("other", (3, 4, 5), Sampling(40), seed=8))
        assert other.token_ids != first.token_ids

    engine.hold(run)


def test_rotary_tables_are_exact(engine: Served) -> None:
    """MKL's first call, made by two threads at once, left half of a table off by 1.5e-4 in 3 of 60 processes."""

    async def run(trial: Trial) -> None:
        llm: Any = trial.engine._llm  # type: ignore[attr-defined]
        (off,) = await llm.collective_rpc("off_in_tables")
        assert off == [0.0]

    engine.hold(run)


def test_an_update_that_does_not_take_is_undone(engine: Served) -> None:
    """vLLM reloads a tied head on a CPU without its packed copy, reports success, and computes with the old head."""

    async def run(trial: Trial) -> None:
        assert trial.teacher is not None
        llm: Any = trial.engine._llm  # type: ignore[attr-defined]
        await trial.update()
        old = (await trial.engine.stats()).version
        await llm.collective_rpc("forget_the_head", args=(True,))
        try:
            if engine.tied:
                with pytest.raises(VersionError, match="lm_head"):
                    await trial.update()
            else:
                await trial.update()
        finally:
            await llm.collective_rpc("forget_the_head", args=(False,))
        version = (await trial.engine.stats()).version
        assert version == (old if engine.tied else old + 1)
        request = trial.request(12)
        result = await trial.run(request)
        assert result.spans == ((version, 0, 12),)
        check_near(result.logprobs, trial.teacher(version, request.prompt_ids, result.token_ids, request.sampling))

    engine.hold(run)


def test_every_span_names_the_weights_that_made_its_tokens(engine: Served) -> None:
    async def run(trial: Trial) -> None:
        assert trial.teacher is not None
        results: list[tuple[Request, Result]] = []

        async def ask(request: Request) -> None:
            results.append((request, await trial.run(request)))

        async with anyio.create_task_group() as tasks:
            for n in range(12):
                for _ in range(2):
                    tasks.start_soon(ask, trial.request(40 + 37 * n % 200))
                await anyio.sleep(0.03)
                await trial.update(cache="recompute")
        assert sum(len(result.spans) for _, result in results) > len(results)
        for request, result in results:
            for version, first, end in result.spans:
                taught = trial.teacher(version, request.prompt_ids, result.token_ids, request.sampling)
                check_near(result.logprobs[first:end], taught[first:end])

    engine.hold(run)


def test_a_pause_is_the_swap_alone(engine: Served, record_property: Callable[[str, object], None]) -> None:
    async def run(trial: Trial) -> None:
        version = (await trial.engine.stats()).version + 1
        update = await trial.engine.update_weights(version, trial.state(version))
        record_property("pause_s", update.pause_s)
        assert update.pause_s < 5

    engine.hold(run)
