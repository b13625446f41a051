"""TransferQueuePlane keeps the contract of every data plane: in one process and on Ray, with either payloads."""

from pathlib import Path

import pytest
from anyio.from_thread import BlockingPortal

from asyncrl.engine.data_plane.tq import TransferQueuePlane
from asyncrl.engine.testing.conformance.plane_contract import CONTRACT, FULL_AT_ROWS, FULL_STORE_CONTRACT, ContractTest
from asyncrl.engine.testing.conformance.queue_in_process import queue_in_process


@pytest.mark.parametrize("sentence", CONTRACT, ids=lambda sentence: sentence.__name__)
def test_transfer_queue_in_process_keeps_the_contract(
    portal: BlockingPortal, in_process_plane: TransferQueuePlane, sentence: ContractTest
) -> None:
    portal.call(sentence, in_process_plane)


@pytest.mark.parametrize("shared", [False, True], ids=["storage", "shared memory"])
@pytest.mark.parametrize("sentence", FULL_STORE_CONTRACT, ids=lambda sentence: sentence.__name__)
def test_a_full_transfer_queue_keeps_the_contract(
    portal: BlockingPortal, sentence: ContractTest, shared: bool, tmp_path: Path
) -> None:
    plane = queue_in_process(capacity_rows=FULL_AT_ROWS, shared_memory=tmp_path if shared else None)
    try:
        portal.call(sentence, plane)
    finally:
        portal.call(plane.close)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sentence", CONTRACT, ids=lambda sentence: sentence.__name__)
def test_transfer_queue_on_ray_keeps_the_contract(
    portal: BlockingPortal, ray_plane: TransferQueuePlane, sentence: ContractTest
) -> None:
    portal.call(sentence, ray_plane)
