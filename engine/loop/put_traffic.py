"""What the collectors put between the last two steps, by path, as their put notices tell it."""

from asyncrl.engine.records.traffic import Traffic


class PutTraffic:
    """Adds up until it is taken; also what groups cost that are dropped."""

    def __init__(self) -> None:
        self._sum = Traffic()

    def report(self, traffic: Traffic) -> None:
        self._sum = self._sum.plus(traffic)

    def take(self) -> Traffic:
        """Return what was put since the last call."""
        taken, self._sum = self._sum, Traffic()
        return taken
