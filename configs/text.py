"""YAML as users write it: `1e-3` is a number, and a key that stands twice is an error."""

import re
from typing import Any

import yaml

_EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key_node.value!r} stands twice", node.start_mark
                )
            if isinstance(key_node, yaml.ScalarNode):
                seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


# YAML 1.1, which PyYAML reads, takes 1e-3 for a string: it wants a point and a sign, 1.0e-3.
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def read_yaml(text: str) -> Any:
    """Parse one document; yaml.YAMLError if it is none."""
    return yaml.load(text, Loader=_Loader)
