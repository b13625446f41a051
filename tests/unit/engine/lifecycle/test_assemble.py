"""Which ranks make up the replicas of a run."""

from typing import Any

import anyio
import pytest

from asyncrl.configs import Override, load
from asyncrl.engine.lifecycle.assemble import replicas_of


class Rank:
    """Notes what it is asked for."""

    def __init__(self, number: int, asked: list[tuple[int, str]]) -> None:
        self.name = f"rank{number}"
        self._number, self._asked = number, asked

    async def hold_weights(self) -> int:
        self._asked.append((self._number, "hold"))
        return 0

    async def lend_weights(self) -> None:
        self._asked.append((self._number, "lend"))


@pytest.mark.parametrize(
    ("sharding", "shard_ranks", "lenders"), [("full", None, [1, 2, 3]), ("hybrid", 2, [1]), ("none", None, [])]
)
def test_those_with_shards_of_rank_0s_model_lend_them_while_it_gathers(
    sharding: str, shard_ranks: int | None, lenders: list[int]
) -> None:
    values = {"trainer.ranks": 4, "trainer.sharding": sharding, "trainer.shard_ranks": shard_ranks}
    config = load("default", [Override(path, value, "--set") for path, value in values.items()]).config
    asked: list[tuple[int, str]] = []
    ranks: Any = [Rank(number, asked) for number in range(4)]
    replicas: Any = replicas_of(config, ranks)
    assert [replica.name for replica in replicas] == ["rank0", "rank1", "rank2", "rank3"]
    anyio.run(replicas[0].hold_weights)
    assert sorted(asked) == [(0, "hold"), *((number, "lend") for number in lenders)]
