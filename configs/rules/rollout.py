"""What must hold between the options of groups, collectors and the data plane.

Each rule is a ValueError that names the options, their values and their range.
"""

from typing import TYPE_CHECKING

from asyncrl.configs.sections.fields import MIN_TEMPERATURE

if TYPE_CHECKING:
    from asyncrl.configs.schema import RunConfig


def groups_fit(config: "RunConfig") -> None:
    """A group is not born stale, and decodes together."""
    rollout = config.rollout
    if rollout.max_publish_lag is not None and rollout.max_publish_lag > rollout.max_staleness:
        raise ValueError(
            f"rollout.max_publish_lag is {rollout.max_publish_lag} and rollout.max_staleness "
            f"{rollout.max_staleness}; the lag must be at most the staleness, or groups are born stale"
        )
    if rollout.min_live > rollout.group_size:
        raise ValueError(
            f"rollout.min_live is {rollout.min_live} and rollout.group_size {rollout.group_size}; "
            "min_live must be at most group_size"
        )
    if rollout.temperature < MIN_TEMPERATURE:
        raise ValueError(
            f"rollout.temperature is {rollout.temperature:g}; logits are divided by it, and stay finite from "
            f"{MIN_TEMPERATURE:g} on"
        )
    if config.collector.decode_samples < rollout.group_size + rollout.oversample:
        more = f" and rollout.oversample {rollout.oversample}" if rollout.oversample else ""
        raise ValueError(
            f"collector.decode_samples is {config.collector.decode_samples}, rollout.group_size "
            f"{rollout.group_size}{more}; a group decodes together, so decode_samples must be at least "
            f"{'their sum' if more else 'group_size'}"
        )


def rows_fit(config: "RunConfig") -> None:
    """The data plane holds what a run has out."""
    rollout, plane = config.rollout, config.data_plane
    # A group in training may be split over all replicas, each of which writes a row for each later column.
    written = (
        config.trainer.later_column_count * rollout.groups_per_step * min(config.trainer.replicas, rollout.group_size)
    )
    more = f", and columns that the ranks write {written} more" if written else ""
    if plane.capacity_rows is not None and plane.capacity_rows < config.run_ahead_groups + written:
        raise ValueError(
            f"data_plane.capacity_rows is {plane.capacity_rows}; run-ahead needs at least "
            f"(max_staleness + 1) * groups_per_step = {config.run_ahead_groups}{more}"
        )


def collectors_may_come_and_go(config: "RunConfig") -> None:
    """Collectors come and go only where nothing depends on their number."""
    most, count = config.cluster.max_collectors, config.collector.count
    if most is None:
        return
    if most < count:
        raise ValueError(
            f"cluster.max_collectors is {most} and collector.count {count}; it must be {count} at least, or null"
        )
    if config.rollout.max_staleness == 0:
        raise ValueError(
            f"cluster.max_collectors is {most} and rollout.max_staleness 0; a run with max_staleness 0 repeats "
            "exactly, and collectors that come and go do not, so it must be 1 at least, or max_collectors null"
        )
    if config.collector.engine == "http":
        raise ValueError(
            f"cluster.max_collectors is {most} and collector.engine http; collector.servers are dealt to the "
            "collectors at the start, so max_collectors must be null"
        )


def outage_ends_before_groups(config: "RunConfig") -> None:
    """It is known that no server is left before groups fail."""
    collector = config.collector
    if collector.engine == "http" and collector.server_timeout_s >= collector.group_timeout_s:
        raise ValueError(
            f"collector.server_timeout_s is {collector.server_timeout_s:g} and collector.group_timeout_s "
            f"{collector.group_timeout_s:g}; server_timeout_s must be less, or groups that wait for a server "
            "fail before it is known that none is left"
        )
