"""A model that is named instead of being a folder: from the name to the folder, which is made or fetched if need be."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from asyncrl.configs import Loaded
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.model import smollm2
from asyncrl.engine.model.hub import Fetch, cached_snapshot, check_online, find_snapshot, is_on_hub
from asyncrl.engine.running.checks import check_model_folder

_IN_CACHE = "{name} in the cache of the Hub"


def needs_conversion(loaded: Loaded) -> bool:
    """Whether a run would have to make its model first; ConfigError if it could not, for lack of a package."""
    if not smollm2.is_named(loaded.config.model.path) or smollm2.is_cached():
        return False
    smollm2.source_file()
    return True


def what_comes_first(loaded: Loaded) -> str | None:
    """Say what a run would do before its model can be checked; None if its folder is there.

    ConfigError if it could not do that, for lack of a package or of a hub to ask.
    """
    check_revision(loaded)
    if needs_conversion(loaded):
        return "convert it into the cache, which takes about a minute"
    model = loaded.config.model
    if is_on_hub(model.path) and cached_snapshot(str(model.path), model.revision) is None:
        check_online(str(model.path), model.revision)
        return "fetch it from the Hugging Face Hub, if it is there"
    return None


def with_cached_model(loaded: Loaded, tell: Callable[[str], None]) -> Loaded:
    """Return the configuration with the folder of a model that is there; `tell` hears that the hub was not asked."""
    model = loaded.config.model
    cached = cached_snapshot(str(model.path), model.revision) if is_on_hub(model.path) else None
    if cached is None:
        return with_model(loaded, tell)
    if model.revision != cached.name:
        tell(f"model.path is {model.path!r}: {cached} was checked; the Hub was not asked whether it has a newer one")
    return _with_folder(loaded, str(cached), _IN_CACHE.format(name=model.path))


def with_model_that_is_there(loaded: Loaded, tell: Callable[[str], None]) -> Loaded:
    """Return the configuration with the folder of its model, for what makes and fetches none.

    `tell` hears that the hub was not asked. ConfigError if the folder is not there, or lacks a file.
    """
    first = what_comes_first(loaded)
    if first is not None:
        raise ConfigError(
            f"model.path (from {loaded.sources['model.path']}) is {loaded.config.model.path!r}, which is not in the "
            f"cache: a run would first {first}. Let a run do so, or set model.path to a folder"
        )
    found = with_cached_model(loaded, tell)
    check_model_folder(found)
    return found


def check_revision(loaded: Loaded) -> None:
    """Refuse a revision of what has none; ConfigError names both."""
    model = loaded.config.model
    if model.revision is not None and not is_on_hub(model.path):
        raise ConfigError(
            f"model.revision (from {loaded.sources['model.revision']}) is {model.revision!r}, and model.path "
            f"{model.path!r} is not a model of the Hugging Face Hub (owner/name, and no folder here); it must be null"
        )


def with_model(
    loaded: Loaded, tell: Callable[[str], None], *, convert: smollm2.Convert | None = None, fetch: Fetch | None = None
) -> Loaded:
    """Return the configuration with a folder as `model.path`, making or fetching the model if need be.

    `tell` is given a line before that. ConfigError if a package is missing, the cache cannot be written, or the hub
    does not give the model.
    """
    check_revision(loaded)
    model = loaded.config.model
    if is_on_hub(model.path):
        name = str(model.path)
        snapshot = find_snapshot(name, model.revision, timeout_s=model.fetch_timeout_s, tell=tell, fetch=fetch)
        return _with_folder(loaded, str(snapshot), _IN_CACHE.format(name=name))
    if not smollm2.is_named(model.path):
        return loaded
    folder = smollm2.cached_folder()
    if not smollm2.is_cached():
        source = smollm2.source_file()
        tell(f"converting {source.name} into {folder}, once; this takes about a minute")
        folder = smollm2.make_cached(source, convert=convert)
    return _with_folder(loaded, str(folder), "in the cache")


def _with_folder(loaded: Loaded, folder: str, where: str) -> Loaded:
    """Put the folder in; a snapshot's says its commit itself, so no revision stays beside it."""
    model = loaded.config.model.model_copy(update={"path": folder, "revision": None})
    sources: Mapping[str, str] = {**loaded.sources, "model.path": f"{loaded.sources['model.path']}, {where}"}
    return replace(loaded, config=loaded.config.model_copy(update={"model": model}), sources=sources)
