"""Sample keys: minted once at rollout, `v{version}_p{group}_g{index}`.

`p` is the group's dispatch number, unique in a run, so that the same prompt in another
epoch, a retry or another collector never shares a key. The prompt's own id is a tag.
"""

import re

_KEY = re.compile(r"v(\d+)_p(\d+)_g(\d+)")


def group_row(version: int, group: int) -> str:
    """Name the row that holds a group."""
    return f"v{version}_p{group}"


def sample_keys(version: int, group: int, size: int) -> tuple[str, ...]:
    """Mint the keys of a group of `size` samples whose weights were `version` at dispatch."""
    row = group_row(version, group)
    return tuple(f"{row}_g{index}" for index in range(size))


def is_sample_key(key: str) -> bool:
    return _KEY.fullmatch(key) is not None


def row_of(key: str) -> str:
    """Return the name of the group row that `key` belongs to; ValueError if it is no sample key."""
    if not is_sample_key(key):
        raise ValueError(f"{key!r} is not a sample key (v<version>_p<group>_g<index>)")
    return key.rpartition("_")[0]
