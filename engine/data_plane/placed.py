"""TransferQueue's actors on nodes that are chosen, in the run's namespace, with the keys of its sockets."""

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

from asyncrl.engine.data_plane.curve import CurveKeys, secure


def with_keys(actor: Any) -> Any:
    """Return the actor's class as one whose first argument is the keys, which hold before it makes a socket."""
    import ray

    own: Any = actor.__ray_metadata__.modified_class

    class WithKeys(own):  # type: ignore[misc]
        def __init__(self, keys: CurveKeys, *args: Any, **kwargs: Any) -> None:
            secure(keys)
            super().__init__(*args, **kwargs)

    WithKeys.__name__ = WithKeys.__qualname__ = own.__name__
    return ray.remote(WithKeys)


def on_nodes(nodes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield what puts actors on nodes, by turns; without nodes, where TransferQueue puts them."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    for node in cycle(nodes or [None]):
        there = {} if node is None else {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
        yield there


class Placed:
    """What `options(...)` of one of TransferQueue's actors returns: it starts with the keys, in the run's namespace."""

    def __init__(self, actor: Any, keys: CurveKeys, places: Iterator[dict[str, Any]], **options: Any) -> None:
        import ray

        namespace = ray.get_runtime_context().namespace
        self._actor = actor.options(**{**options, **next(places), "num_cpus": 0, "namespace": namespace})
        self._keys = keys

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        return self._actor.remote(self._keys, *args, **kwargs)
