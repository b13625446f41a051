"""TransferQueue behind a network that is cut or slow: a deadline, a name, and nothing half done."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from copy import copy
from typing import Any

import anyio
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from kit.proxy import Proxy, proxied

from asyncrl.engine.data_plane.tq import TransferQueuePlane
from asyncrl.engine.errors import Overdue
from asyncrl.engine.testing.conformance.plane_contract import (
    TOKENS,
    claim_groups,
    contract_columns,
    contract_group,
    contract_partition,
    put_groups,
    rows_of,
)
from asyncrl.engine.testing.conformance.queue_in_process import queue_in_process

pytestmark = pytest.mark.chaos
DEADLINE_S = 1.0


class Network:
    """A TransferQueue, and the proxies before its parts by `part/port`."""

    def __init__(self, stack: ExitStack, portal: BlockingPortal) -> None:
        self._stack = stack
        self.proxies: dict[str, Proxy] = {}
        self.plane = portal.call(self._start)
        stack.callback(portal.call, self.plane.close)
        self.call = portal.call

    async def _start(self) -> TransferQueuePlane:
        plane = queue_in_process(deadline_s=DEADLINE_S, route=self._route)
        await plane.register(contract_partition("p"))
        return plane

    def _route(self, part: str, info: Any) -> Any:
        routed = copy(info)
        routed.ports = {}
        for name, port in info.ports.items():
            proxy = self.proxies[f"{part}/{name}"] = self._stack.enter_context(proxied(port))
            routed.ports[name] = proxy.port
        return routed

    def before(self, part: str) -> list[Proxy]:
        return [proxy for name, proxy in self.proxies.items() if name.startswith(part)]


@pytest.fixture
def network() -> Iterator[Network]:
    with ExitStack() as stack:
        portal = stack.enter_context(start_blocking_portal())
        yield Network(stack, portal)


@pytest.mark.parametrize("part", ["controller", "storage"])
def test_what_is_cut_off_is_overdue_by_name_and_goes_on_once_the_cut_is_mended(network: Network, part: str) -> None:
    """CASE-B8, CASE-E6: no put that was given up is claimed, and the group can be put again."""
    plane, group = network.plane, contract_group(0)
    for proxy in network.before(part):
        proxy.cut()
    began = time.monotonic()
    with pytest.raises(Overdue, match=r"TransferQueue did not answer put within 1 s"):
        network.call(put_groups, plane, "p", [group])
    # A put that failed cleans up for five seconds at most.
    assert time.monotonic() - began < DEADLINE_S + 6
    for proxy in network.before(part):
        proxy.heal()

    async def again() -> list[str]:
        with anyio.fail_after(20):
            while True:
                try:
                    await put_groups(plane, "p", [contract_group(1)])
                    return rows_of(await claim_groups(plane, "p"))
                except Overdue:
                    await anyio.sleep(0.1)

    assert network.call(again) == [contract_group(1).row]
    assert network.call(plane.keys, "p") == list(contract_group(1).keys)


def test_a_slow_storage_unit_is_waited_for_within_the_deadline(network: Network) -> None:
    plane, group = network.plane, contract_group(0)
    for proxy in network.before("storage"):
        proxy.delay_s = 0.1
    network.call(put_groups, plane, "p", [group])
    found = network.call(plane.read, "p", group.keys, (TOKENS,))
    assert [tokens.tolist() for tokens in found[TOKENS]] == [t.tolist() for t in contract_columns(group)[TOKENS]]
    for proxy in network.before("storage"):
        proxy.delay_s = 5.0
    with pytest.raises(Overdue, match=r"TransferQueue did not answer read within 1 s"):
        network.call(plane.read, "p", group.keys, (TOKENS,))
