"""The weights of ranks that have none, and so nothing on a device: of tests, simulations and replays."""

from collections.abc import Sequence

from asyncrl.engine.weights.base import Offer, Sent, WeightTransport


class NoWeights:
    """Sends empty weights, at once."""

    __slots__ = ()

    async def weights(self) -> Sent:
        return Sent({})

    async def copy_weights(self, transport: WeightTransport) -> Sent:
        return Sent({})

    async def offer(self, sent: Sent, receivers: Sequence[str], *, again: bool = False) -> Offer:
        return Offer(sent.content)

    async def sleep(self) -> None:
        """There is nothing to move."""

    async def wake(self) -> None:
        """There is nothing to move."""

    async def serve(self, offer: Offer) -> None:
        raise AssertionError("nobody meets a rank without weights")
