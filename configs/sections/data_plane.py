"""Where rollouts are stored."""

from asyncrl.configs.sections.fields import Count, Few, Seconds, Section


class DataPlane(Section):
    shared_memory: str | None
    """Directory through which processes of one host pass tensors without a copy; auto: /dev/shm if it has a GiB free,
    else null; null: tensors go through TransferQueue's storage, as several hosts need."""
    storage_units: Few
    """Number of TransferQueue storage processes."""
    capacity_rows: Count | None
    """Rows (groups) that the store can hold; null: no limit. Run-ahead needs (max_staleness + 1) · groups_per_step."""
    deadline_s: Seconds
    """Longest wait for one answer of the data plane."""
    lease_s: Seconds
    """A claim that is neither settled nor renewed for this long may be taken by another owner."""
    poll_s: Seconds
    """Interval of the slow poll that backs up the put notices; groups that it finds are counted."""
