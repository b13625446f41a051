"""Engines outside the collector's own model, from a configuration: vLLM beside it, and servers over HTTP."""

from asyncrl.collectors.engines.base import Engine
from asyncrl.collectors.engines.http.settings import HTTPSettings
from asyncrl.configs import RunConfig
from asyncrl.engine.model.tokenizer import Tokenizer

ELSEWHERE = ("vllm", "http")
"""Engines that load the checkpoint themselves, and take weights through a folder."""


def servers_of(config: RunConfig, index: int) -> tuple[str, ...]:
    """Return the servers of the collector `index`: dealt out in turn, of five to two it has 0, 2 and 4, or 1 and 3."""
    return tuple(config.collector.servers[index :: config.collector.count])


def build_elsewhere(config: RunConfig, index: int, tokenizer: Tokenizer) -> Engine:
    """Return the engine of the collector `index`."""

    if config.collector.engine == "http":
        # Whoever generates in this process need not import an HTTP client.
        from asyncrl.collectors.engines.http.engine import HTTPEngine

        return HTTPEngine(http_settings(config, servers_of(config, index)), text=tokenizer.whole_text)
    from asyncrl.collectors.engines.vllm.engine import VLLMEngine
    from asyncrl.collectors.engines.vllm.settings import VLLMSettings

    collector = config.collector
    assert config.model.path is not None
    assert collector.slot_tokens is not None, "with_slots comes first"
    settings = VLLMSettings(
        config.model.path,
        dtype=config.model.dtype,
        max_length=collector.slot_tokens,
        rows=collector.decode_samples,
        cache_bytes=int(collector.cache_gib * 2**30),
        threads=collector.threads,
        weights_folder=config.weights_folder,
    )
    return VLLMEngine(settings, text=tokenizer.whole_text)


def http_settings(config: RunConfig, urls: tuple[str, ...]) -> HTTPSettings:
    """Return what the HTTP engine is built from, before these servers."""
    collector = config.collector
    assert config.model.path is not None
    assert collector.slot_tokens is not None, "with_slots comes first"
    return HTTPSettings(
        urls,
        collector.server_kind,
        config.model.path,
        dtype=config.model.dtype,
        max_length=collector.slot_tokens,
        rows=collector.decode_samples,
        weights_folder=config.weights_folder,
        outage_s=collector.server_timeout_s,
    )
