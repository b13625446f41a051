"""Where requests to servers go, how many at once, and what servers say of their load."""

from typing import Any, cast

from asyncrl.collectors.engines.http.metrics_page import values
from asyncrl.collectors.engines.http.routing import Replica, Router
from asyncrl.collectors.engines.in_flight import InFlightLimit, Pressure

FULL = Pressure(cache_used=1.0, waiting=0, preemptions=0)


def test_a_replica_that_was_cut_gets_nothing_beyond_its_limit_while_another_has_room() -> None:
    replicas = [Replica(cast(Any, None), url, InFlightLimit(5), up=True) for url in ("a", "b", "c")]
    router = Router(replicas)
    assert router.limit() == 15
    replicas[0].in_flight.observe(FULL, in_flight=5, now=0.0)
    assert router.limit() == 4 + 5 + 5
    replicas[0].outstanding, replicas[1].outstanding, replicas[2].outstanding = 4, 5, 4
    assert router.least() is replicas[2]
    replicas[2].up = False
    assert router.limit() == 4 + 5
    # Asked again after a death, a request goes somewhere all the same.
    assert router.least() is replicas[0]


def test_values_of_a_metric_are_read_whatever_its_labels() -> None:
    page = '# TYPE a:use gauge\na:use{engine="0",m="x y"} 0.5\na:use{engine="1"} 7e-1\na:use_more 3\na:plain 2.0\n'
    assert values(page, "a:use") == [0.5, 0.7]
    assert values(page, "a:plain") == [2.0]
    assert values(page, "a:none") == []
    assert values("<html>not found</html>", "a:use") == []
