"""Objects that users name as `module:Name` or `file.py:Name`: filters, tasks, rewards."""

import difflib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.engine.errors import ConfigError


def load_object(path: str, *, option: str) -> Any:
    """Import `module:Name`, or `Name` of a file; ConfigError, with the option's name, if that fails."""
    module_name, _, name = path.rpartition(":")
    if not module_name or not name:
        raise ConfigError(f"{option} is {path!r}; write it as module:Class")
    try:
        module = _file_module(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{option} {path}: cannot import {module_name}: {error}") from error
    except KeyboardInterrupt:
        raise
    except SyntaxError as error:
        raise ConfigError(f"{option} {path}: {module_name} is not Python: {error}") from error
    except BaseException as error:  # A user's module may raise anything during its import, also SystemExit.
        raise ConfigError(f"{option} {path}: importing {module_name} raised {error!r}") from error
    if not hasattr(module, name):
        close = difflib.get_close_matches(name, dir(module), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{option} {path}: {module_name} has no {name}{hint}")
    return getattr(module, name)


def _file_module(file: str) -> ModuleType:
    """Import a file once per process; a relative path is searched for as modules are, in the folders of sys.path.

    So it is found in processes that work in another folder too: they are given the user's folder in sys.path.
    """
    places = [Path.cwd() / file, *(Path(folder) / file for folder in sys.path)]
    found = next((place.resolve() for place in places if place.is_file()), None)
    if found is None:
        raise ImportError(f"there is no such file in {Path.cwd()}, nor in a folder of sys.path")
    name = f"{found.stem}@{found}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, found)
    assert spec is not None
    assert spec.loader is not None, "a name that ends with .py has Python's loader"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
