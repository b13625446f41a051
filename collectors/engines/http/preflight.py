"""Whether servers are what a run needs: asked before anything starts, and nothing is changed on them."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from asyncrl.collectors.engines.http.client import Client, Refused, ServerDown
from asyncrl.collectors.engines.http.kinds import KINDS
from asyncrl.collectors.engines.http.server import Server, Wanted
from asyncrl.collectors.engines.http.settings import HTTPSettings
from asyncrl.engine.model.settings import read_json

CHECK_S = 4.0
"""Bad input is told in five seconds."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a server: it is not there, or it is and has to be another."""

    url: str
    what: str


async def faults(settings: HTTPSettings, limit_s: float = CHECK_S) -> list[Fault]:
    """Ask all servers at once; return a fault for each that the run could not use, in the order of the URLs.

    `weights_folder` must be there, and writable: whether servers see it is told by a file in it. A server that has
    not answered all questions within `limit_s` counts as not there.
    """
    found: dict[str, str] = {}
    folder = Path(settings.model_path)
    with tempfile.NamedTemporaryFile(prefix=".asyncrl-", dir=settings.weights_folder) as file:
        wanted = Wanted(shape_of(folder), settings.max_length, Path(file.name))
        async with anyio.create_task_group() as tasks:
            for url in settings.urls:
                server = KINDS[settings.kind](Client(url, timeout_s=limit_s, tries=1), folder)
                tasks.start_soon(_ask, url, server, wanted, limit_s, found)
    return [Fault(url, found[url]) for url in settings.urls if found[url]]


async def _ask(url: str, server: Server, wanted: Wanted, limit_s: float, found: dict[str, str]) -> None:
    try:
        with anyio.fail_after(limit_s):
            found[url] = await server.fault(wanted)
    except TimeoutError:
        found[url] = f"it has not answered within {limit_s:g} s"
    except (ServerDown, Refused) as error:
        found[url] = str(error)
    finally:
        with anyio.CancelScope(shield=True):
            await server.close()


def shape_of(checkpoint: Path) -> Mapping[str, Any]:
    """Return what of a checkpoint's config.json tells one model from another."""
    config = read_json(checkpoint / "config.json")
    text = config.get("text_config") or config
    names = ("vocab_size", "hidden_size", "num_hidden_layers")
    shape = {name: text[name] for name in names if name in text}
    return {"architectures": config["architectures"], **shape} if config.get("architectures") else shape
