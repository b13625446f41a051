"""Where rollouts are stored."""

from typing import Annotated, Literal

from pydantic import Field

from asyncrl.configs.sections.fields import Count, Few, Seconds, Section


class DataPlane(Section):
    backend: Literal["simple", "mooncake"]
    """Store of the tensors. simple: shared memory or TransferQueue's storage, as `shared_memory` says; mooncake:
    Mooncake's store, for several hosts with RDMA; needs `scripts/install mooncake` (docs/data-plane.md)."""
    shared_memory: str | None
    """Directory through which processes of one host pass tensors without a copy; auto: /dev/shm if it has a GiB free,
    else null; null: tensors go through TransferQueue's storage, as several hosts need."""
    storage_units: Few
    """Number of storage processes: TransferQueue's, or Mooncake's, of which each lends `mooncake_segment_gib`."""
    mooncake_segment_gib: Annotated[float, Field(ge=0.015625, le=1e6)]
    """Memory in GiB that each storage process lends Mooncake's store; all of them must fit into their node's memory."""
    mooncake_protocol: Literal["auto", "tcp", "rdma"]
    """How Mooncake moves bytes; auto: rdma where the driver's node has a device for it, else tcp."""
    mooncake_devices: str
    """RDMA devices that Mooncake uses, separated by commas (mlx5_0,mlx5_1); empty: it chooses."""
    capacity_rows: Count | None
    """Rows (groups) that the store can hold; null: no limit. Run-ahead needs (max_staleness + 1) · groups_per_step."""
    deadline_s: Seconds
    """Longest wait for one answer of the data plane."""
    lease_s: Seconds
    """A claim that is neither settled nor renewed for this long may be taken by another owner."""
    poll_s: Seconds
    """Interval of the slow poll that backs up the put notices; groups that it finds are counted."""
