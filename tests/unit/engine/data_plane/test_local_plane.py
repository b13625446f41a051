"""LocalPlane keeps the contract of every data plane, in virtual time."""

import pytest

from asyncrl.engine.aio.virtual_time import run_virtual, virtual_clock
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.testing.conformance.plane_contract import CONTRACT, FULL_AT_ROWS, FULL_STORE_CONTRACT, ContractTest


@pytest.mark.parametrize("sentence", CONTRACT, ids=lambda sentence: sentence.__name__)
def test_the_local_plane_keeps_the_contract(sentence: ContractTest) -> None:
    run_virtual(sentence, LocalPlane(clock=virtual_clock))


@pytest.mark.parametrize("sentence", FULL_STORE_CONTRACT, ids=lambda sentence: sentence.__name__)
def test_a_full_local_plane_keeps_the_contract(sentence: ContractTest) -> None:
    run_virtual(sentence, LocalPlane(clock=virtual_clock, capacity_rows=FULL_AT_ROWS))
