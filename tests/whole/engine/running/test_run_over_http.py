"""A whole run on servers over HTTP: fakes with vLLM's routes, behind which a small model makes the tokens."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal
from transformers import AutoModelForCausalLM

from asyncrl import ConfigError, RunFailed
from asyncrl.engine.events.types import StepEnded
from asyncrl.engine.testing.conformance.engine_trials import native_engine
from asyncrl.engine.testing.conformance.fake_servers import FakeServer, fake_servers

from .conftest import Small


def engine_of(folder: Path, weights: Mapping[str, Any]) -> Any:
    return native_engine(AutoModelForCausalLM.from_pretrained(folder).eval(), rows=64, length=16)


@contextmanager
def serving(kind: str, folder: Path, count: int, **more: Any) -> Iterator[Any]:
    """Run fakes in an event loop of their own; yield their loop and them."""
    servers = fake_servers(kind, folder, count, make_engine=partial(engine_of, folder), **more)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(servers) as running:
        yield portal, running


def options(llama_checkpoint: Path, servers: list[FakeServer], **more: Any) -> dict[str, Any]:
    return {
        "model.path": str(llama_checkpoint),
        "collector.engine": "http",
        "collector.servers": [server.url for server in servers],
        "collector.weights_folder": str(llama_checkpoint.parent),
        "run.steps": 4,
        "run.batches": None,
        "trainer.sft_warm_up_steps": 20,
        "trainer.sft_warm_up_learning_rate": 0.01,
        **more,
    }


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_two_collectors_train_on_three_servers(small: Small, llama_checkpoint: Path, kind: str) -> None:
    """What a server says of each token is what the trainer finds: it has the weights of every version, also of 0.

    After a warm-up version 0 is not the checkpoint.
    """
    steps: list[StepEnded] = []
    more = {"collector.server_kind": kind, "collector.count": 2, "rollout.max_staleness": 0}
    with serving(kind, llama_checkpoint, 3) as (_, servers):
        summary = small(options(llama_checkpoint, servers, **more), progress=steps.append)
        assert all(server.asked and server.label in ("3", "4") for server in servers)
    assert summary.exit_code == 0
    assert [step.metrics["train/ratio_mean"] for step in steps] == pytest.approx([1.0] * 4, abs=1e-4)
    assert any(step.metrics["train/grad_norm"] > 0.01 for step in steps[:-1])
    assert list(llama_checkpoint.parent.glob("asyncrl-*")) == []


def test_a_server_that_dies_is_left_out_and_comes_back_with_the_weights_of_today(
    small: Small, llama_checkpoint: Path, tmp_path: Path
) -> None:
    with serving("vllm", llama_checkpoint, 2) as (portal, (dying, other)):

        def meddle(step: StepEnded) -> None:
            if step.version == 2:
                portal.call(dying.kill)
            if step.version == 4:
                portal.call(dying.restart)

        more = {"run.steps": 14, "collector.server_timeout_s": 1.0}
        summary = small(options(llama_checkpoint, [dying, other], **more), progress=meddle)
        assert dying.label is not None
        assert int(dying.label) > 4
        assert dying.asked > 0
    assert (summary.exit_code, summary.ledger["failed"]) == (0, {})
    told = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    (warning,) = [line for line in told if line["event"] == "a server is left out"]
    assert (warning["server"], warning["left"]) == (dying.url, 1)


def test_without_a_server_the_run_ends_with_the_cause(small: Small, llama_checkpoint: Path) -> None:
    with serving("vllm", llama_checkpoint, 1) as (portal, (only,)):
        more = {"collector.server_timeout_s": 0.3}
        with pytest.raises(
            RunFailed, match=r"no server for 0\.3 s \(collector.server_timeout_s\): http://127.* does not answer"
        ):
            small(options(llama_checkpoint, [only], **more), progress=lambda _: portal.call(only.kill))


def test_a_run_whose_server_is_not_there_does_not_start(small: Small, llama_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot use: http://127.0.0.1:1/health does not answer"):
        small(options(llama_checkpoint, [], **{"collector.servers": ["http://127.0.0.1:1"]}))
    assert not (tmp_path / "out").exists()
