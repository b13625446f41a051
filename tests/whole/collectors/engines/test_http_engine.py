"""The HTTP engine before fakes of vLLM's and SGLang's servers: the contract, and servers that die, refuse and lie."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from safetensors.torch import save_file
from structlog.testing import capture_logs

from asyncrl.collectors.engines.base import Finish, Request, Sampling
from asyncrl.collectors.engines.http.client import ServerDown
from asyncrl.collectors.engines.http.engine import HTTPEngine
from asyncrl.collectors.engines.http.routing import Router
from asyncrl.collectors.engines.http.server import Reply
from asyncrl.collectors.engines.http.settings import HTTPSettings
from asyncrl.collectors.engines.in_flight import Pressure
from asyncrl.collectors.generators.base import GroupRequest
from asyncrl.collectors.generators.engine_generator import EngineGenerator
from asyncrl.engine.errors import GenerationError, VersionError
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
    kind: str, checkpoint: Path, replicas: int = 1, *, answer_s: float = 5.0, outage_s: float = 1.0, **more: Any
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
            answer_s=answer_s,
            outage_s=outage_s,
        )
        async with serving(HTTPEngine(settings)) as engine:
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


@asynccontextmanager
async def asking(trial: Trial, count: int) -> AsyncIterator[None]:
    """Have so many long requests out, and cancel what is left of them at the end."""
    async with anyio.create_task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(trial.run, trial.long_request())
        yield
        tasks.cancel_scope.cancel()


def router_of(trial: Trial) -> Router:
    assert isinstance(trial.engine, HTTPEngine)
    return trial.engine._router


async def limit_reaches(trial: Trial, limit: int) -> None:
    while router_of(trial).limit() != limit:
        await anyio.sleep(0.01)


@KINDS
def test_a_replica_whose_cache_is_full_gets_fewer_requests_at_once_until_it_has_room(
    kind: str, checkpoint: Path
) -> None:
    async def run() -> None:
        async with trial_of(kind, checkpoint, replicas=2, token_s=0.02) as (trial, (full, calm)):
            full.load_told = Pressure(cache_used=0.97, waiting=0, preemptions=0)
            async with asking(trial, 60):
                await limit_reaches(trial, 6 + 8)
                # Those that it had end first.
                while (await full.engine.stats()).running > 6:
                    await anyio.sleep(0.01)
                for _ in range(20):
                    assert (await full.engine.stats()).running <= 6
                    await anyio.sleep(0.01)
                assert (await calm.engine.stats()).running == 8
                assert (await trial.engine.stats()).cache_used == pytest.approx(0.97 / 2)
                full.load_told = Pressure(cache_used=0.5, waiting=0, preemptions=0)
                await limit_reaches(trial, 8 + 8)

    held(run)


@KINDS
def test_a_replica_that_does_not_tell_its_load_keeps_the_configured_width(kind: str, checkpoint: Path) -> None:
    async def run() -> None:
        async with trial_of(kind, checkpoint, token_s=0.02) as (trial, (server,)):
            server.load_told = None
            async with asking(trial, 8):
                while router_of(trial).replicas[0].tells:
                    await anyio.sleep(0.01)
                server.load_told = Pressure(cache_used=1.0, waiting=9, preemptions=9)
                await anyio.sleep(0.4)
                assert router_of(trial).limit() == 8

    held(run)


def test_preemptions_of_before_the_run_hold_nothing_back(checkpoint: Path) -> None:
    """vLLM counts since its start; only those that come now are a reason for fewer requests."""

    async def run() -> None:
        async with trial_of("vllm", checkpoint, token_s=0.02) as (trial, (server,)):
            server.load_told = Pressure(cache_used=0.5, waiting=0, preemptions=500)
            async with asking(trial, 8):
                await anyio.sleep(0.6)
                assert router_of(trial).limit() == 8
                server.load_told = Pressure(cache_used=0.5, waiting=0, preemptions=501)
                await limit_reaches(trial, 6)

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
def test_what_a_server_dies_with_after_an_update_goes_on_as_of_the_older_version(kind: str, checkpoint: Path) -> None:
    """The versions of its tokens would have come last."""

    async def run() -> None:
        async with trial_of(kind, checkpoint, replicas=2, token_s=0.005) as (trial, servers):
            async with reading(trial, *(trial.long_request() for _ in range(2)), tokens=3) as streams:
                await trial.update()
                had = [len(stream.token_ids) for stream in streams]
                for stream, tokens in zip(streams, had, strict=True):
                    await stream.until(tokens + 3)
                await servers[0].kill()
            moved = next(
                stream for stream in streams if stream.results[0].spans[0][2] >= had[streams.index(stream)] + 3
            )
            assert [stream.results[0].finish for stream in streams] == ["length"] * 2
            assert [version for version, _, _ in moved.results[0].spans] == [0, 1]

    held(run)


@KINDS
def test_what_a_server_that_hangs_was_asked_is_asked_elsewhere(kind: str, checkpoint: Path) -> None:
    """It keeps its connections, so that nothing but a missed probe tells; and an update passes it over."""

    async def run() -> None:
        async with trial_of(kind, checkpoint, replicas=2, answer_s=0.2, token_s=0.002) as (trial, servers):
            async with reading(trial, *(trial.long_request() for _ in range(4)), tokens=3) as streams:
                servers[0].hung = True
                await trial.update()
            assert [stream.results[0].finish for stream in streams] == ["length"] * 4
            assert servers[1].asked == 4
            servers[0].hung = False
            with anyio.fail_after(5):
                while servers[0].label != "1":
                    await anyio.sleep(0.01)
            assert servers[0].weights["norm.weight"].tolist() == [1.0] * 4

    held(run)


def test_a_death_is_told_once_with_its_cause_and_so_is_the_return(checkpoint: Path) -> None:
    async def run() -> None:
        with capture_logs() as logs:
            async with trial_of("vllm", checkpoint, replicas=2) as (trial, servers), anyio.create_task_group() as tasks:
                await servers[0].kill()
                await anyio.sleep(0.2)
                await servers[0].start(tasks)
                while len(router_of(trial).up) < 2:
                    await anyio.sleep(0.01)
                await servers[0].kill()
        of_it = [entry for entry in logs if entry["server"] == servers[0].url]
        out, back = of_it[1:3]
        assert [entry["log_level"] for entry in of_it[:3]] == ["info", "warning", "info"]
        assert (out["event"], out["left"]) == ("a server is left out", 1)
        assert "does not answer: ConnectError" in out["why"]
        assert (back["event"], back["servers"]) == ("a server takes requests", 2)

    held(run)


def test_without_any_server_the_engine_ends_with_the_cause(checkpoint: Path) -> None:
    async def run() -> None:
        async with trial_of("vllm", checkpoint, outage_s=0.2) as (trial, (server,)):
            await server.kill()
            await trial.run(trial.request(4))

    with pytest.raises(ExceptionGroup) as told:
        held(run)
    assert told.group_contains(GenerationError, match=r"no server for 0\.2 s .*: http://127.* does not answer")


def test_a_number_that_an_earlier_run_left_proves_nothing(checkpoint: Path) -> None:
    """A server that is away at the start and comes back with the number of today's version, and other weights."""

    async def run() -> None:
        async with trial_of("vllm", checkpoint, replicas=2) as (trial, servers), anyio.create_task_group() as tasks:
            await servers[0].kill()
            await trial.update()
            await servers[0].start(tasks)
            servers[0].label, servers[0].weights = "1", state(7)
            with anyio.fail_after(5):
                while len(router_of(trial).up) < 2:
                    await anyio.sleep(0.01)
            assert servers[0].weights["norm.weight"].tolist() == [1.0] * 4
            await servers[0].kill()

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


@KINDS
def test_what_is_asked_again_while_an_update_aborts_makes_no_token_of_the_old_version(
    kind: str, checkpoint: Path
) -> None:
    """Samples whose aborts end first begin anew while the others' aborts are under way."""
    found: list[tuple[int, ...]] = []

    async def run() -> None:
        async with trial_of(kind, checkpoint, token_s=0.005) as (trial, _):
            generator = EngineGenerator(trial.engine, Sampling(60), on_update="restart")

            async def ask(group: int) -> None:
                made = await generator.generate(GroupRequest((1, 2, 3 + group), (0, 1, 2, 3), 60, 1.0))
                found.extend(tuple(version for version, _first, _end in one.spans) for one in made)

            async with anyio.create_task_group() as tasks:
                for group in range(8):
                    tasks.start_soon(ask, group)
                await anyio.sleep(0.1)
                await generator.update_weights(1, state(1))

    held(run)
    assert found == [(1,)] * 32


@pytest.mark.parametrize(
    ("replies", "ending"), [(["down"] * 4 + ["length"], "length"), (["abort"] * 4 + ["down", "abort"], "error")]
)
def test_rounds_that_end_early_are_counted_and_a_whole_answer_is_none_of_them(
    replies: list[str], ending: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers that die five times; and a server that ends a request for no reason, of whose rounds the fifth dies."""
    asked: list[str] = []

    async def run() -> None:
        async with trial_of("vllm", checkpoint) as (trial, _):
            engine: Any = trial.engine
            (replica,) = engine._router.replicas
            monkeypatch.setattr(engine._fleet, "leave_out", lambda *_: None)

            async def generate(name: str, request: Request, answer: Any, salt: str) -> AsyncIterator[Reply]:
                asked.append(name)
                await anyio.sleep(0)
                what = replies[min(len(asked), len(replies)) - 1]
                if what == "down":
                    raise ServerDown("gone")
                count = answer.left if what == "length" else 0
                finish: Finish = "length" if count else "abort"
                yield Reply((5,) * count, (-1.0,) * count, finish, ((0, 0, count),) if count else ())

            monkeypatch.setattr(replica.server, "generate", generate)
            stream = Stream(engine, Request("a", (1, 2), Sampling(4), seed=0))
            assert (await stream.result()).finish == ending

    held(run)
    assert len(asked) == len(replies)
