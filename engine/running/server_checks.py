"""What must hold of the servers that a configuration names: of their URLs first, then of what answers there."""

import os
from pathlib import Path
from urllib.parse import urlsplit

import anyio

from asyncrl.collectors.tasks.prepared import PreparedTask
from asyncrl.configs import Loaded, load
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.running.threads import run_beside_loop


def check_server_options(loaded: Loaded) -> None:
    """Refuse URLs that cannot be used, and options without an effect on the configured engine; nothing is asked."""
    collector = loaded.config.collector
    if collector.engine != "http":
        for name, off in (("servers", []), ("server_kind", "vllm")):
            if getattr(collector, name) != off:
                raise ConfigError(
                    f"{_option(loaded, name)}, and collector.engine {collector.engine!r}, which asks no server; "
                    f"it must be {off}, or the engine 'http'"
                )
    if collector.engine in ("vllm", "http"):
        folder = loaded.config.weights_folder
        if not (Path(folder).is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            raise ConfigError(
                f"{_option(loaded, 'weights_folder')}, and weights would go through {folder}; that must be a folder "
                "that can be written to"
            )
    elif collector.weights_folder is not None:
        raise ConfigError(
            f"{_option(loaded, 'weights_folder')}, and collector.engine {collector.engine!r}, which takes weights "
            "without a folder; it must be null, or the engine 'vllm' or 'http'"
        )
    if collector.engine == "http":
        _check_urls(loaded)
        _check_idle_options(loaded)


def check_servers(loaded: Loaded, prepared: PreparedTask) -> None:
    """Ask every server whether the run can use it; ConfigError for the first that it cannot, within five seconds."""
    from asyncrl.collectors.engines.http.preflight import faults
    from asyncrl.engine.lifecycle.engines import http_settings
    from asyncrl.engine.lifecycle.parts import with_slots

    config = with_slots(loaded.config, prepared.prompts)
    servers = tuple(config.collector.servers)
    found = run_beside_loop(lambda _: anyio.run(faults, http_settings(config, servers)))
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise ConfigError(
            f"collector.servers (from {loaded.sources['collector.servers']}) has {found[0].url!r}, which the run "
            f"cannot use: {found[0].what}{more}. docs/engines.md says how to start a server"
        )


def _check_urls(loaded: Loaded) -> None:
    collector = loaded.config.collector
    urls = [url.rstrip("/") for url in collector.servers]
    for url in urls:
        if not _is_base(url):
            raise ConfigError(
                f"collector.servers (from {loaded.sources['collector.servers']}) has {url!r}; each must be "
                "http://HOST:PORT or https://HOST:PORT"
            )
    twice = next((url for url in urls if urls.count(url) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"collector.servers (from {loaded.sources['collector.servers']}) has {twice!r} {urls.count(twice)} times; "
            "each server must stand there once"
        )
    if len(urls) < collector.count:
        raise ConfigError(
            f"collector.servers (from {loaded.sources['collector.servers']}) has {len(urls)} and collector.count is "
            f"{collector.count}; each collector needs a server of its own, so servers must be at least count"
        )


def _is_base(url: str) -> bool:
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # A port that is not a number, or too large; brackets that do not close.
        return False
    return known and not (parts.query or parts.fragment or any(c.isspace() for c in url))


def _check_idle_options(loaded: Loaded) -> None:
    """Refuse what servers over HTTP do not do, or have options of their own for."""
    config, usual = loaded.config, load().config
    if config.collector.server_kind == "sglang":
        for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            value = getattr(config.rollout, name)
            if value != off:
                raise ConfigError(
                    f"rollout.{name} (from {loaded.sources[f'rollout.{name}']}) is {value} and collector.server_kind "
                    f"'sglang', whose log-probabilities are of the distribution before it; it must be {off}"
                )
    for name, flag in (("device", "where it was started"), ("cache_gib", "--kv-cache-memory-bytes and the like")):
        off = getattr(usual.collector, name)
        if getattr(config.collector, name) != off:
            raise ConfigError(
                f"{_option(loaded, name)}, and collector.engine 'http'; a server has that from its own command "
                f"({flag}), so it must be {off}"
            )


def _option(loaded: Loaded, name: str) -> str:
    path = f"collector.{name}"
    return f"{path} (from {loaded.sources[path]}) is {getattr(loaded.config.collector, name)!r}"
