"""Groups, partitions and claims that tell one key from any other, for tests of planes."""

import itertools
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import torch

from asyncrl.engine.data_plane.base import Claim, DataPlane, Partition
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.keys import sample_keys

TOKENS = "tokens"
TRAINER = "trainer"
# The capacity, in rows, of the planes that FULL_STORE_CONTRACT is for.
FULL_AT_ROWS = 2

_claim_numbers = itertools.count()


def contract_partition(
    name: str,
    *,
    size: int = 2,
    columns: Sequence[str] = (TOKENS,),
    consumers: Sequence[str] = (TRAINER,),
    objects: Sequence[str] = (),
    later: Sequence[str] = (),
) -> Partition:
    return Partition(name, size, tuple(columns), tuple(consumers), tuple(objects), tuple(later))


def contract_group(number: int, *, version: int = 0, size: int = 2, **tags: Any) -> GroupMeta:
    """Build a group whose keys are minted as a collector mints them."""
    return GroupMeta(sample_keys(version, number, size), {"group": number, "version": version, **tags})


def contract_columns(group: GroupMeta) -> dict[str, list[torch.Tensor]]:
    """Return tokens that tell one key from any other, of different lengths."""
    return {TOKENS: [torch.tensor([group.tags["group"], i, *range(i)], dtype=torch.int32) for i in range(group.size)]}


async def put_groups(plane: DataPlane, partition: str, groups: Sequence[GroupMeta]) -> None:
    for group in groups:
        await plane.put(partition, group, contract_columns(group))


async def claim_groups(
    plane: DataPlane,
    partition: str,
    max_groups: int = 100,
    *,
    owner: str = "owner",
    claim_id: str | None = None,
    consumer: str = TRAINER,
    columns: Sequence[str] = (TOKENS,),
) -> Claim:
    return await plane.claim(
        partition,
        consumer,
        columns=columns,
        max_groups=max_groups,
        owner=owner,
        claim_id=claim_id or f"{owner}/{next(_claim_numbers)}",
    )


async def leave_row(plane: DataPlane, partition: str, name: str, tags: Mapping[str, Any]) -> None:
    """Put a row without bytes as another writer would, past the plane's own checks."""
    inner: Any = getattr(plane, "_plane", plane)
    if isinstance(inner, LocalPlane):
        inner._tags[partition][name] = dict(tags)
        return
    meta = await inner._client.async_kv_retrieve_meta([name], partition, create=True)
    if tags:
        meta.update_custom_meta([dict(tags)])
        await inner._client.async_set_custom_meta(meta)


async def refused(error: type[Exception], call: Awaitable[Any], *words: str) -> None:
    """Assert that `call` raises `error` and that the message has all `words`."""
    try:
        answer = await call
    except error as raised:
        message = repr(raised)
    else:
        raise AssertionError(f"{error.__name__} was expected; the answer was {answer!r}")
    missing = [word for word in words if word not in message]
    assert not missing, f"{message} does not name {missing}"


def rows_of(claim: Claim) -> list[str]:
    return [group.row for group in claim.groups]


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Say whether dtype, shape and every bit agree, NaN payloads and signs of zero included."""
    return left.dtype == right.dtype and left.shape == right.shape and _bits(left) == _bits(right)


def _bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


async def read_one(plane: DataPlane, partition: str, group: GroupMeta, column: str = TOKENS) -> list[Any]:
    return (await plane.read(partition, group.keys, (column,)))[column]
