"""Which ranks hold parts of one replica of the model, and which hold the same part of several.

Invariant: every replica has one rank for each (tensor, pipeline) place, and the one with the lowest number leads it.
"""

from dataclasses import dataclass

from asyncrl.configs.sections.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands: `data` is the number of its replica, `tensor` and `pipeline` say which part of it it holds.

    `expert` says which part of the experts of a mixture it holds.
    """

    tensor: int
    pipeline: int
    expert: int
    data: int


@dataclass(frozen=True, slots=True)
class Parallel:
    """How many ranks there are, and into how many parts each replica is divided.

    Numbers are those of Megatron-LM (order tp-cp-ep-dp-pp): of neighbouring ranks the tensor place changes first, then
    the replica, then the pipeline stage. Expert parallelism divides the replicas: each holds all other weights of its
    part, and a share of the experts. With 8 ranks, tensor 2 and pipeline 2 there are two replicas: ranks 0, 1, 4 and 5
    hold the first (0 and 1 its first stage), and 2, 3, 6 and 7 the second; 0 and 2 hold the same part.
    """

    ranks: int
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    @classmethod
    def of(cls, trainer: Trainer) -> "Parallel":
        """Take what a configuration says, whose validation has seen to it that the numbers divide."""
        return cls(trainer.ranks, trainer.tensor_parallel, trainer.pipeline_parallel, trainer.expert_parallel)

    @property
    def data(self) -> int:
        """How many replicas there are."""
        return self.ranks // (self.tensor * self.pipeline)

    def place(self, rank: int) -> Place:
        """Return where a rank stands."""
        rest, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return Place(tensor, pipeline, data % self.expert, data)

    def replica(self, data: int) -> list[int]:
        """Return the ranks that hold a replica; the first one leads."""
        return [
            self._number(tensor, pipeline, data) for pipeline in range(self.pipeline) for tensor in range(self.tensor)
        ]

    def experts(self, data: int) -> list[int]:
        """Return the ranks of other replicas that hold experts which this one lacks."""
        first = data - data % self.expert
        return [rank for other in range(first, first + self.expert) if other != data for rank in self.replica(other)]

    def siblings(self, rank: int) -> list[int]:
        """Return the ranks of a rank's own replica, itself among them."""
        return self.replica(self.place(rank).data)

    def peers(self, rank: int) -> list[int]:
        """Return the ranks that hold the same part of each replica, in their order: those whose gradients add up."""
        place = self.place(rank)
        return [self._number(place.tensor, place.pipeline, data) for data in range(self.data)]

    def _number(self, tensor: int, pipeline: int, data: int) -> int:
        return tensor + self.tensor * (data + self.data * pipeline)
