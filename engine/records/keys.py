"""Sample keys, `v{version}_p{group}_g{index}`, made once, at rollout.

`p` is the group's dispatch number, which is unique in a run. So the same prompt has other keys in another epoch, in a
retry or at another collector. The prompt's own id is a tag.
"""

import re

_KEY = re.compile(r"v(\d+)_p(\d+)_g(\d+)")


def group_row(version: int, group: int) -> str:
    """Return the name of a group's row."""
    return f"v{version}_p{group}"


def sample_keys(version: int, group: int, size: int) -> tuple[str, ...]:
    """Return the keys of a group of `size` samples whose generator served `version` at dispatch."""
    row = group_row(version, group)
    return tuple(f"{row}_g{index}" for index in range(size))


def is_sample_key(key: str) -> bool:
    return _KEY.fullmatch(key) is not None


def row_of(key: str) -> str:
    """Return the name of the group row that `key` belongs to; ValueError if it is not a sample key."""
    if not is_sample_key(key):
        raise ValueError(f"{key!r} is not a sample key (v<version>_p<group>_g<index>)")
    return key.rpartition("_")[0]
