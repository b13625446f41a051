"""The observing wrapper counts what passes and changes nothing of it."""

import anyio
import pytest
import torch
from structlog.testing import capture_logs

from asyncrl.engine.aio.virtual_time import run_virtual, virtual_clock
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.data_plane.observe import ObservedPlane
from asyncrl.engine.errors import MissingRows, Overdue
from asyncrl.engine.testing.conformance.plane_contract import (
    CONTRACT,
    TOKENS,
    ContractTest,
    claim_groups,
    contract_group,
    contract_partition,
    leave_row,
    put_groups,
)
from asyncrl.engine.testing.fakes import FaultyPlane


@pytest.mark.parametrize("sentence", CONTRACT, ids=lambda sentence: sentence.__name__)
def test_an_observed_plane_keeps_the_contract(sentence: ContractTest) -> None:
    run_virtual(sentence, ObservedPlane(LocalPlane(clock=virtual_clock), clock=virtual_clock))


def test_calls_keys_bytes_seconds_and_status_are_counted_by_operation() -> None:
    async def main() -> None:
        async def overdue() -> None:
            await anyio.sleep(3)
            raise Overdue("too late")

        slow = FaultyPlane(
            LocalPlane(clock=virtual_clock),
            {"put": lambda n: anyio.sleep(2), "leased": lambda n: overdue()},
        )
        plane = ObservedPlane(slow, clock=virtual_clock)
        await plane.register(contract_partition("p"))
        groups = [contract_group(n) for n in range(2)]
        await put_groups(plane, "p", groups)
        before = plane.snapshot()
        claim = await claim_groups(plane, "p", 1)
        await plane.read("p", groups[0].keys, (TOKENS,))
        with pytest.raises(MissingRows):
            await plane.read("p", groups[0].keys, ("nothing",))
        with pytest.raises(Overdue):
            await plane.leased(claim.lease)
        await plane.clear("p", groups[0].keys, lease=claim.lease)
        assert len(await plane.keys("p")) == 2
        stats = plane.snapshot()
        assert "claim" not in before
        assert before["put"].calls == 2
        # Tokens [n, 0] and [n, 1, 0] of int32: 20 bytes a group.
        put = stats["put"]
        assert (put.calls, put.keys, put.bytes, put.seconds) == (2, 4, 40, 4.0)
        assert (stats["claim"].keys, stats["claim"].bytes) == (2, 0)
        assert stats["read"].status == {"ok": 1, "error": 1, "timeout": 0}
        assert (stats["read"].calls, stats["read"].bytes) == (2, 20)
        assert stats["leased"].status == {"ok": 0, "error": 0, "timeout": 1}
        assert stats["leased"].seconds == 3.0
        assert (stats["clear"].keys, stats["keys"].keys) == (2, 2)
        await plane.close()
        operations = ["register", "put", "claim", "read", "leased", "clear", "keys", "close"]
        assert list(plane.snapshot()) == operations

    run_virtual(main)


def test_a_snapshot_does_not_change_afterwards() -> None:
    async def main() -> None:
        plane = ObservedPlane(LocalPlane(clock=virtual_clock), clock=virtual_clock)
        await plane.register(contract_partition("p"))
        await plane.put("p", contract_group(0), {TOKENS: [torch.zeros(1)] * 2})
        snapshot = plane.snapshot()
        await plane.put("p", contract_group(1), {TOKENS: [torch.zeros(1)] * 2})
        assert snapshot["put"].calls == 1
        assert snapshot["put"].status["ok"] == 1

    run_virtual(main)


def test_a_row_of_another_writer_is_counted_and_warned_of_once() -> None:
    """FOUND-I12: whoever reads the log learns which row was passed over, and why."""

    async def main() -> None:
        plane = ObservedPlane(LocalPlane(clock=virtual_clock), clock=virtual_clock)
        await plane.register(contract_partition("p"))
        await leave_row(plane, "p", "v0_p9", {"reward": 1.0})
        with capture_logs() as logs:
            for _ in range(3):
                assert (await claim_groups(plane, "p")).groups == ()
        assert plane.snapshot()["claim"].passed_over == 1
        (entry,) = logs
        assert (entry["log_level"], entry["partition"], entry["row"]) == ("warning", "p", "v0_p9")
        assert "schema None" in entry["why"]

    run_virtual(main)
