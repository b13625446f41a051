"""Servers over HTTP are checked before anything starts: options first, then what answers at each URL."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from asyncrl import ConfigError
from asyncrl.collectors.engines.http.preflight import faults
from asyncrl.collectors.engines.http.settings import HTTPSettings
from asyncrl.collectors.tasks.prepared import prepare_task
from asyncrl.configs import Loaded, Override, load
from asyncrl.engine.running.checks import check_engine
from asyncrl.engine.running.server_checks import check_server_options, check_servers
from asyncrl.engine.testing.conformance.fake_servers import FakeServer, fake_servers

EMBEDDING = "model.embed_tokens.weight"
SHAPE = {"architectures": ["LlamaForCausalLM"], "vocab_size": 15, "hidden_size": 16, "num_hidden_layers": 1}


def loaded_of(**values: Any) -> Loaded:
    """Return a configuration with these values of the collector, or of the path that a key names."""
    return load("default", [Override(key if "." in key else f"collector.{key}", values[key], "here") for key in values])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"servers": ["http://a:1"]},
            r"collector.servers .from here. is .*'auto', which asks no server; it must be \[\]",
        ),
        ({"server_kind": "sglang"}, "collector.server_kind .from here. is 'sglang', .* it must be vllm"),
        ({"weights_folder": "/tmp"}, "collector.weights_folder .from here. is '/tmp', .* it must be null"),
        ({"engine": "http"}, "collector.servers .from default. has 0 and collector.count is 1"),
        ({"engine": "http", "servers": ["http://a:1"], "count": 2}, "has 1 and collector.count is 2"),
        ({"engine": "http", "servers": ["a:1"]}, "has 'a:1'; each must be http://HOST:PORT"),
        ({"engine": "http", "servers": ["http://a:99999"]}, "each must be http://HOST:PORT"),
        ({"engine": "http", "servers": ["http://a:1?x=2"]}, "each must be http://HOST:PORT"),
        ({"engine": "http", "servers": ["http://a:1/", "http://a:1"]}, "'http://a:1' 2 times"),
        ({"engine": "http", "servers": ["http://a:1"], "weights_folder": "/not/there"}, "that must be a folder"),
        ({"engine": "http", "servers": ["http://a:1"], "device": "cpu"}, "collector.device .* it must be auto"),
        ({"engine": "http", "servers": ["http://a:1"], "cache_gib": 1.0}, "collector.cache_gib .* it must be 4.0"),
        (
            {"engine": "http", "servers": ["http://a:1"], "server_kind": "sglang", "rollout.top_k": 4},
            r"rollout.top_k .from here. is 4 and collector.server_kind 'sglang'",
        ),
    ],
)
def test_an_option_that_cannot_work_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_server_options(loaded_of(**values))


def test_servers_need_a_checkpoint_and_an_outage_ends_before_its_groups_fail() -> None:
    with pytest.raises(ConfigError, match=r"loads a checkpoint from model.path, which is null"):
        check_engine(loaded_of(engine="http", servers=["http://a:1"]))
    with pytest.raises(ConfigError, match=r"server_timeout_s is 60 and collector.group_timeout_s 60"):
        loaded_of(engine="http", server_timeout_s=60.0)


@pytest.fixture(scope="module")
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal() as portal:
        yield portal


Check = Callable[..., str | None]


@pytest.fixture
def check(portal: BlockingPortal, llama_checkpoint: Path) -> Check:
    """Ask a fake server, changed by `change`, for a run; return what is refused, if anything is."""
    prepared = prepare_task("echo", {}, warm_up=False)

    def started(kind: str, change: Callable[[FakeServer], Any], **values: Any) -> str | None:
        with portal.wrap_async_context_manager(fake_servers(kind, llama_checkpoint)) as (server,):
            server.about["model"] = SHAPE
            change(server)
            given = {
                "engine": "http",
                "servers": [server.url],
                "server_kind": kind,
                "weights_folder": str(llama_checkpoint.parent),
                "model.path": str(llama_checkpoint),
                **values,
            }
            try:
                check_servers(loaded_of(**given), prepared)
            except ConfigError as error:
                return str(error).replace(server.url, "URL")
            assert list(llama_checkpoint.parent.glob(".asyncrl-*")) == []
            return None

    return started


def nothing(_: FakeServer) -> None:
    pass


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_that_is_as_it_must_be_is_let_pass(check: Check, kind: str) -> None:
    assert check(kind, nothing) is None


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        (
            "vllm",
            lambda s: s.missing.update({"/weight_info": 404}),
            ["without VLLM_SERVER_DEV_MODE=1", "vllm.entrypoints.openai.api_server"],
        ),
        (
            "vllm",
            lambda s: s.missing.update({"/weight_info": 404, "/inference/v1/generate": 403}),
            ["without VLLM_SERVER_DEV_MODE=1 in its environment and --enable-scale-out; start it with VLLM_SERVER"],
        ),
        (
            "vllm",
            lambda s: s.missing.update({"/collective_rpc": 500}),
            ["do not know asyncrl", "--worker-extension-cls"],
        ),
        ("vllm", lambda s: s.about.update(logprobs_mode="raw_logprobs"), ["--logprobs-mode processed_logprobs"]),
        ("vllm", lambda s: s.about.update(backend="nccl"), ["'nccl'", "--weight-transfer-config"]),
        ("vllm", lambda s: s.about.update(max_length=3), ["3 tokens", "come to 4", "--max-model-len"]),
        ("vllm", lambda s: s.about.update(model={**SHAPE, "vocab_size": 99}), ["vocab_size is 99 there, and 15 in"]),
        ("vllm", lambda s: s.missing.update({"/version": 404}), ["does not look like vLLM's", "collector.server_kind"]),
        ("vllm", lambda s: s.missing.update({"/health": 503}), ["URL/health answered 503"]),
        ("vllm", lambda s: s.about.update(sees=False), ["cannot read", "collector.weights_folder must be the same"]),
        ("sglang", lambda s: s.missing.update({"/model_info": 404}), ["does not look like SGLang's"]),
        ("sglang", lambda s: s.missing.update({"/get_weights_by_name": 400}), ["it has no model.embed_tokens.weight"]),
        ("sglang", lambda s: s.weights.update({EMBEDDING: s.weights[EMBEDDING][:, :9]}), ["is 9 there"]),
    ],
)
def test_a_server_that_a_run_could_not_use_is_refused_with_what_to_do(
    check: Check, kind: str, change: Callable[[FakeServer], Any], words: list[str]
) -> None:
    told = check(kind, change)
    assert told is not None
    assert "collector.servers (from here) has 'URL', which the run cannot use" in told
    assert all(word in told for word in words), told


def test_servers_that_are_not_there_are_told_of(check: Check) -> None:
    told = check("vllm", nothing, servers=["http://127.0.0.1:1", "http://127.0.0.1:2"])
    assert told is not None
    assert "'http://127.0.0.1:1'" in told
    assert "does not answer: ConnectError" in told
    assert "(and 1 more)" in told


def test_a_server_that_hangs_is_told_of_in_time(portal: BlockingPortal, llama_checkpoint: Path) -> None:
    with portal.wrap_async_context_manager(fake_servers("vllm", llama_checkpoint)) as (server,):
        server.hung = True
        settings = HTTPSettings(
            (server.url,), "vllm", str(llama_checkpoint), weights_folder=str(llama_checkpoint.parent)
        )
        (fault,) = portal.call(faults, settings, 0.1)
    assert (fault.url, fault.what) == (server.url, "it has not answered within 0.1 s")
