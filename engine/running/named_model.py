"""A model that is named instead of being a folder: from the name to the folder, which is made if it is not there."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from asyncrl.configs import Loaded
from asyncrl.engine.model import smollm2


def needs_conversion(loaded: Loaded) -> bool:
    """Whether a run would have to make its model first; ConfigError if it could not, for lack of a package."""
    if not smollm2.is_named(loaded.config.model.path) or smollm2.is_cached():
        return False
    smollm2.source_file()
    return True


def with_model(loaded: Loaded, tell: Callable[[str], None], *, convert: smollm2.Convert | None = None) -> Loaded:
    """Return the configuration with a folder as `model.path`, converting the model if it is not in the cache.

    `tell` is given a line before that. ConfigError if a package is missing, or the cache cannot be written.
    """
    if not smollm2.is_named(loaded.config.model.path):
        return loaded
    folder = smollm2.cached_folder()
    if not smollm2.is_cached():
        source = smollm2.source_file()
        tell(f"converting {source.name} into {folder}, once; this takes about a minute")
        folder = smollm2.make_cached(source, convert=convert)
    config = loaded.config
    model = config.model.model_copy(update={"path": str(folder)})
    sources: Mapping[str, str] = {**loaded.sources, "model.path": f"{loaded.sources['model.path']}, in the cache"}
    return replace(loaded, config=config.model_copy(update={"model": model}), sources=sources)
