"""Where ranks stand: who holds a replica together, who adds gradients up."""

import pytest

from asyncrl.trainers.parallel import Parallel, Place

SHAPES = [(1, 1, 1, 1), (4, 1, 1, 1), (4, 2, 1, 1), (4, 1, 2, 1), (8, 2, 2, 2), (12, 2, 3, 1), (24, 3, 2, 4)]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_rank_is_in_one_replica_and_adds_up_with_one_rank_of_each(shape: tuple[int, int, int, int]) -> None:
    parallel = Parallel(*shape)
    replicas = [parallel.replica(data) for data in range(parallel.data)]
    assert sorted(rank for replica in replicas for rank in replica) == list(range(parallel.ranks))
    assert {len(replica) for replica in replicas} == {parallel.tensor * parallel.pipeline}
    for data, replica in enumerate(replicas):
        assert replica[0] == min(replica) == parallel.tensor * data
        for rank in replica:
            place, peers = parallel.place(rank), parallel.peers(rank)
            assert parallel.siblings(rank) == replica
            assert place.data == data
            assert place.expert == data % parallel.expert
            assert len(peers) == parallel.data
            assert peers[data] == rank
            for peer in peers:
                other = parallel.place(peer)
                assert (other.tensor, other.pipeline) == (place.tensor, place.pipeline)


def test_numbers_are_megatrons() -> None:
    """Its order tp-cp-ep-dp-pp: tensor first, then data, of which experts are the lower part, and stages last."""
    parallel = Parallel(16, tensor=2, pipeline=2, expert=2)
    assert parallel.data == 4
    assert parallel.place(0) == Place(0, 0, 0, 0)
    assert parallel.place(1) == Place(1, 0, 0, 0)
    assert parallel.place(2) == Place(0, 0, 1, 1)
    assert parallel.place(4) == Place(0, 0, 0, 2)
    assert parallel.place(8) == Place(0, 1, 0, 0)
    assert parallel.replica(1) == [2, 3, 10, 11]
    assert parallel.experts(0) == parallel.replica(1)
    assert parallel.experts(3) == parallel.replica(2)
    assert Parallel(4).experts(1) == []
    assert parallel.peers(9) == [9, 11, 13, 15]
