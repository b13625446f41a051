"""TransferQueuePlane keeps the contract of every data plane, in one process and on Ray."""

import pytest
from anyio.from_thread import BlockingPortal

from asyncrl.engine.data_plane.tq import TransferQueuePlane
from asyncrl.engine.testing.plane_contract import CONTRACT, FULL_AT_ROWS, FULL_STORE_CONTRACT, ContractTest


@pytest.mark.parametrize("sentence", CONTRACT, ids=lambda sentence: sentence.__name__)
def test_transfer_queue_in_process_keeps_the_contract(
    portal: BlockingPortal, in_process_plane: TransferQueuePlane, sentence: ContractTest
) -> None:
    portal.call(sentence, in_process_plane)


@pytest.mark.parametrize("sentence", FULL_STORE_CONTRACT, ids=lambda sentence: sentence.__name__)
def test_a_full_transfer_queue_keeps_the_contract(portal: BlockingPortal, sentence: ContractTest) -> None:
    plane = TransferQueuePlane.in_process(capacity_rows=FULL_AT_ROWS)
    try:
        portal.call(sentence, plane)
    finally:
        portal.call(plane.close)


@pytest.mark.parametrize("sentence", CONTRACT, ids=lambda sentence: sentence.__name__)
def test_transfer_queue_on_ray_keeps_the_contract(
    portal: BlockingPortal, ray_plane: TransferQueuePlane, sentence: ContractTest
) -> None:
    portal.call(sentence, ray_plane)
