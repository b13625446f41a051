"""Configuration: frozen sections, presets, and how a run's values come together."""

from asyncrl.configs.load import Loaded, Override, flatten, load, load_config, parse_set, parse_value, preset_names
from asyncrl.configs.schema import RunConfig

__all__ = [
    "Loaded",
    "Override",
    "RunConfig",
    "flatten",
    "load",
    "load_config",
    "parse_set",
    "parse_value",
    "preset_names",
]
