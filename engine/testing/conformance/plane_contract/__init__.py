"""What every DataPlane must do, as one suite: async functions of a plane, named as sentences.

Tests parametrize over `CONTRACT`, and over `FULL_STORE_CONTRACT` with planes that hold two rows.
Each function has a partition of its own, so that they can share a plane.
"""

from collections.abc import Awaitable, Callable

from asyncrl.engine.data_plane.base import DataPlane
from asyncrl.engine.testing.conformance.plane_contract.claims import CLAIMS
from asyncrl.engine.testing.conformance.plane_contract.clears import CLEARS
from asyncrl.engine.testing.conformance.plane_contract.groups import (
    FULL_AT_ROWS,
    TOKENS,
    TRAINER,
    claim_groups,
    contract_columns,
    contract_group,
    contract_partition,
    leave_row,
    put_groups,
    read_one,
    refused,
    rows_of,
    same_bits,
)
from asyncrl.engine.testing.conformance.plane_contract.later_columns import LATER_COLUMNS
from asyncrl.engine.testing.conformance.plane_contract.other_writers import OTHER_WRITERS
from asyncrl.engine.testing.conformance.plane_contract.partitions import PARTITIONS
from asyncrl.engine.testing.conformance.plane_contract.puts import FULL_STORE, PUTS

ContractTest = Callable[[DataPlane], Awaitable[None]]

CONTRACT: tuple[ContractTest, ...] = (*PUTS, *CLAIMS, *LATER_COLUMNS, *CLEARS, *PARTITIONS, *OTHER_WRITERS)

FULL_STORE_CONTRACT: tuple[ContractTest, ...] = FULL_STORE

__all__ = [
    "CONTRACT",
    "FULL_AT_ROWS",
    "FULL_STORE_CONTRACT",
    "TOKENS",
    "TRAINER",
    "ContractTest",
    "claim_groups",
    "contract_columns",
    "contract_group",
    "contract_partition",
    "leave_row",
    "put_groups",
    "read_one",
    "refused",
    "rows_of",
    "same_bits",
]
