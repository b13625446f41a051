"""Objects that users name as `module:Name`: filters, tasks."""

import difflib
import importlib
from typing import Any

from asyncrl.engine.errors import ConfigError


def load_object(path: str, *, option: str) -> Any:
    """Import `module:Name`; ConfigError, with the option's name, if that fails."""
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f"{option} is {path!r}; write it as module:Class")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{option} {path}: cannot import {module_name}: {error}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # A user's module may raise anything during its import, also SystemExit.
        raise ConfigError(f"{option} {path}: importing {module_name} raised {error!r}") from error
    if not hasattr(module, name):
        close = difflib.get_close_matches(name, dir(module), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{option} {path}: {module_name} has no {name}{hint}")
    return getattr(module, name)
