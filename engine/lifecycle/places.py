"""Where the parts of a run go: on which nodes of a Ray cluster, and with what of their resources."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from asyncrl.configs import RunConfig
from asyncrl.configs.sections.fields import Section
from asyncrl.engine.lifecycle.network import LOOPBACK

_ANYWHERE: Mapping[str, Any] = MappingProxyType({"num_cpus": 0, "max_restarts": 0})

_PATHS = {"model": ("path",), "trainer": ("weight_folder",), "collector": ("weights_folder",)}


@dataclass(frozen=True, slots=True)
class Places:
    """`options` are Ray's, by part (`rank0`, `collector0`, …); a part without has what Ray gives it, and no CPU.

    `address` is that of the driver's node, where the parts meet. Parts of `one_node` see the driver's shared memory.
    `storage` are the ids of the nodes that store rows, by turns; none: all of the cluster. With `joined` the cluster is
    others': each part sees only the GPUs that it asked for, whole ones with `own_gpus`, and finds the user's files in
    its own working folder, a copy, instead of the driver's. `nodes` are Ray's ids of where parts have their places, and
    `addresses` those nodes'. `paths` are what every node has to see, with the options that ask for it.
    """

    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    address: str = LOOPBACK
    one_node: bool = True
    storage: tuple[str, ...] = ()
    joined: bool = False
    nodes: Mapping[str, str] = field(default_factory=dict)
    addresses: Mapping[str, str] = field(default_factory=dict)
    paths: Mapping[str, str] = field(default_factory=dict)
    own_gpus: bool = False

    def of_ranks(self, count: int) -> list[tuple[str, str]]:
        """Return address and Ray's id of each rank's node, in a run on several; none on one."""
        parts = [] if self.one_node else [f"rank{i}" for i in range(count)]
        return [(self.addresses[part], self.nodes[part]) for part in parts]

    def options_of(self, part: str) -> dict[str, Any]:
        """Return the options of a part's actor, also of one that takes the place of another."""
        return {**_ANYWHERE, **self.options.get(part, {})}

    def config_for_parts(self, config: RunConfig) -> RunConfig:
        """Return the configuration as the parts read it: in another folder, relative paths would lead nowhere."""
        if not self.joined:
            return config
        return config.model_copy(update={name: _absolute(getattr(config, name), keys) for name, keys in _PATHS.items()})


def _absolute(section: Section, keys: Sequence[str]) -> Section:
    paths = {key: getattr(section, key) for key in keys}
    return section.model_copy(update={key: str(Path(path).absolute()) for key, path in paths.items() if path})


ONE_NODE = Places()
"""Those of a cluster of the run's own."""
