"""The HTTP engine before fakes of vLLM's and SGLang's servers: the contract, and servers that die, refuse and lie."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from safetensors.torch import save_file

from asyncrl.collectors.engines.base import Request, Sampling
from asyncrl.collectors.engines.http.engine import HTTPEngine
from asyncrl.collectors.engines.http.settings import HTTPSettings
from asyncrl.engine.errors import VersionError
from asyncrl.engine.testing.conformance.engine_contract import CONTRACT, Stream, Trial, reading
from asyncrl.engine.testing.conformance.engine_trials import VOCABULARY, serving
from asyncrl.engine.testing.conformance.fake_servers import FakeServer, fake_servers

KINDS = pytest.mark.parametrize("kind", ["vllm", "sglang"])
LIMIT_S = 30.0


def state(version: int) -> dict[str, torch.Tensor]:
    return {"lm_head.weight": torch.full((8, 2), float(version)), "norm.weight": torch.full((4,), float(version))}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file(state(0), folder / "model.safetensors")
    return folder


@asynccontextmanager
async def trial_of(
    kind: str, checkpoint: Path, replicas: int = 1, **more: Any
) -> AsyncIterator[tuple[Trial, list[FakeServer]]]:
    """Run an engine before fakes, from when all of them are up."""
    async with fake_servers(kind, checkpoint, replicas, **more) as servers:
        settings = HTTPSettings(
            tuple(server.url for server in servers),
            kind,  # type: ignore[arg-type]
            str(checkpoint),
            dtype="float32",
            max_length=1024,
            rows=8,
            weights_folder=str(checkpoint.parent),
            answer_s=5.0,
        )
        async with serving(HTTPEngine(settings, probe_every_s=0.02)) as engine:
            trial = Trial(engine, states=[state(0), state(1)], vocabulary=VOCABULARY, long_tokens=60)
            while len(engine._router.up) < replicas:
                await anyio.sleep(0.005)
            yield trial, servers


def held(test: Callable[[], Any]) -> None:
    async def limited() -> None:
        with anyio.fail_after(LIMIT_S):
            await test()

    anyio.run(limited)


@KINDS
def test_contract(kind: str, checkpoint: Path) -> None:
    async def run() -> None:
        async with trial_of(kind, checkpoint) as (trial, _):
            for test in CONTRACT:
                await test(trial)

    held(run)


@KINDS
def test_requests_go_to_the_replica_with_the_fewest_outstanding(kind: str, checkpoint: Path) -> None:
    async def run() -> None:
        async with (
            trial_of(kind, checkpoint, replicas=2) as (trial, servers),
            reading(trial, *(trial.long_request() for _ in range(6))),
        ):
            assert [(await server.engine.stats()).running for server in servers] == [3, 3]

    held(run)


@KINDS
def test_a_reader_that_is_cancelled_leaves_nothing_on_the_server(kind: str, checkpoint: Path) -> None:
    async def run() -> None:
        async with trial_of(kind, checkpoint, token_s=0.01) as (trial, (server,)):
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    for _ in range(3):
                        tasks.start_soon(trial.run, trial.long_request())
                    while (await server.engine.stats()).running < 3:
                        await anyio.sleep(0.001)
                    scope.cancel()
            while (await server.engine.stats()).running:
                await anyio.sleep(0.001)
            assert (await server.engine.stats()).tokens < 3 * trial.long_tokens

    held(run)


@KINDS
def test_a_request_goes_on_elsewhere_when_its_replica_dies(kind: str, checkpoint: Path) -> None:
    async def run() -> None:
        async with trial_of(kind, checkpoint, replicas=2, token_s=0.01) as (trial, servers):
            async with reading(trial, *(trial.long_request() for _ in range(4)), tokens=3) as streams:
                await servers[0].kill()
            assert [stream.results[0].finish for stream in streams] == ["length"] * 4
            assert [stream.results[0].spans for stream in streams] == [((0, 0, trial.long_tokens),)] * 4
            assert servers[1].asked == 4

    held(run)


@KINDS
def test_a_replica_that_comes_back_gets_the_version_that_serves(kind: str, checkpoint: Path) -> None:
    async def run() -> None:
        async with trial_of(kind, checkpoint, replicas=2) as (trial, servers), anyio.create_task_group() as tasks:
            await servers[0].kill()
            await trial.run(trial.request(4))
            await trial.update()
            await servers[0].start(tasks)
            with anyio.fail_after(5):
                while servers[0].label != "1":
                    await anyio.sleep(0.01)
            assert servers[0].weights["norm.weight"].tolist() == [1.0] * 4
            for _ in range(2):
                assert (await trial.run(trial.request(3))).spans == ((1, 0, 3),)
            async with reading(trial, *(trial.long_request() for _ in range(2))):
                assert [(await server.engine.stats()).running for server in servers] == [1, 1]
            await servers[0].kill()

    held(run)


@KINDS
@pytest.mark.parametrize("fault", ["refuse", "forget"])
def test_an_update_that_one_replica_does_not_take_is_undone_on_all(kind: str, fault: str, checkpoint: Path) -> None:
    """`forget`: it reports success and goes on with the old weights, as vLLM does with a tied head on a CPU."""

    async def run() -> None:
        async with trial_of(kind, checkpoint, replicas=2) as (trial, servers):
            await trial.update()
            setattr(servers[1], fault, 1)
            with pytest.raises(VersionError, match="version 2"):
                await trial.engine.update_weights(2, state(2))
            setattr(servers[1], fault, 0)
            up = [server for server in servers if server.label == "1"]
            assert servers[0] in up
            assert all(server.weights["norm.weight"].tolist() == [1.0] * 4 for server in up)
            assert (await trial.run(trial.request(3))).spans == ((1, 0, 3),)
            await trial.engine.update_weights(2, state(2))
            assert (await trial.run(trial.request(3))).spans == ((2, 0, 3),)

    held(run)


def test_requests_wait_while_no_server_is_up(checkpoint: Path) -> None:
    async def run() -> None:
        async with trial_of("vllm", checkpoint) as (trial, (server,)), anyio.create_task_group() as tasks:
            await server.kill()
            stream = Stream(trial.engine, trial.request(4))
            tasks.start_soon(stream.result)
            await anyio.sleep(0.2)
            assert not stream.results
            await server.start(tasks)
            await trial.until(lambda stats: not stats.running and not stats.waiting)
            assert stream.results[0].finish == "length"
            await server.kill()

    held(run)


def test_no_file_of_weights_is_left_behind(checkpoint: Path) -> None:
    async def run() -> None:
        async with trial_of("vllm", checkpoint) as (trial, _):
            for _ in range(3):
                await trial.update()
            assert len(list(checkpoint.parent.glob("asyncrl-*/version-*"))) == 1

    held(run)
    assert list(checkpoint.parent.glob("asyncrl-*")) == []


def test_a_request_that_a_server_refuses_ends_as_an_error(checkpoint: Path) -> None:
    async def run() -> None:
        async with trial_of("vllm", checkpoint) as (trial, (server,)):
            # The fake, like vLLM, has fewer positions than this engine was told.
            server.engine._length = 8
            result = await Stream(trial.engine, Request("long", (1, 2, 3), Sampling(100), 0)).result()
            assert (result.finish, result.token_ids) == ("error", ())
            assert result.error

    held(run)


def test_sglang_is_not_asked_for_logprobs_that_it_does_not_have(checkpoint: Path) -> None:
    """CASE-G4: its log-probabilities are those of the distribution before the filters."""

    async def run() -> None:
        async with trial_of("sglang", checkpoint) as (trial, (server,)):
            for sampling in ({"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}):
                result = await Stream(trial.engine, trial.request(4, **sampling)).result()
                assert result.finish == "error"
                assert "top_k" in result.error
            assert server.asked == 0
            assert (await trial.run(trial.request(4, temperature=0.5))).finish == "length"

    held(run)
