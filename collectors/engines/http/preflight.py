"""Whether servers are what a run needs: asked before anything starts, and nothing is changed on them."""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from asyncrl.collectors.engines.http.client import Client, Refused, ServerDown
from asyncrl.collectors.engines.http.kinds import KINDS
from asyncrl.collectors.engines.http.server import Wanted
from asyncrl.collectors.engines.http.settings import HTTPSettings

_CHECK_S = 4.0
"""A server that has not answered all questions by then counts as not there: bad input is told in five seconds."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a server: it is not there, or it is and has to be another."""

    url: str
    what: str


async def faults(settings: HTTPSettings) -> list[Fault]:
    """Ask all servers at once; return a fault for each that the run could not use, in the order of the URLs.

    `weights_folder` must be there, and writable: whether servers see it is told by a file in it.
    """
    found: dict[str, str] = {}
    folder = Path(settings.model_path)
    with tempfile.NamedTemporaryFile(prefix=".asyncrl-", dir=settings.weights_folder) as file:
        wanted = Wanted(shape_of(folder), settings.max_length, Path(file.name))
        async with anyio.create_task_group() as tasks:
            for url in settings.urls:
                tasks.start_soon(_ask, url, settings, wanted, found)
    return [Fault(url, found[url]) for url in settings.urls if found[url]]


async def _ask(url: str, settings: HTTPSettings, wanted: Wanted, found: dict[str, str]) -> None:
    server = KINDS[settings.kind](Client(url, timeout_s=_CHECK_S, tries=1), Path(settings.model_path))
    try:
        with anyio.fail_after(_CHECK_S):
            found[url] = await server.fault(wanted)
    except TimeoutError:
        found[url] = f"it did not answer all questions within {_CHECK_S:g} s"
    except (ServerDown, Refused) as error:
        found[url] = str(error)
    finally:
        with anyio.CancelScope(shield=True):
            await server.close()


def shape_of(checkpoint: Path) -> Mapping[str, Any]:
    """Return what of a checkpoint's config.json tells one model from another."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config") or config
    names = ("vocab_size", "hidden_size", "num_hidden_layers")
    shape = {name: text[name] for name in names if name in text}
    return {"architectures": config["architectures"], **shape} if config.get("architectures") else shape
