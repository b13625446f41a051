"""What is broken, how and when: drawn from a seed, so that a session can be repeated."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Part = Literal["collector", "rank", "controller", "storage", "score", "driver", "engine"]
Kind = Literal["kill", "stop", "pause", "slow", "cut"]

PARTS: tuple[Part, ...] = ("collector", "rank", "controller", "storage", "score", "driver")
"""The processes that every run has. An `engine` is one only in a run on servers."""

_WEIGHTS: dict[tuple[Part, Kind], int] = {
    ("collector", "kill"): 3,
    ("collector", "stop"): 2,
    ("collector", "pause"): 2,
    ("collector", "slow"): 1,
    ("rank", "kill"): 3,
    ("rank", "stop"): 2,
    ("rank", "pause"): 2,
    ("rank", "slow"): 1,
    ("controller", "kill"): 2,
    ("controller", "stop"): 1,
    ("controller", "pause"): 1,
    ("controller", "slow"): 1,
    ("storage", "kill"): 2,
    ("storage", "stop"): 1,
    ("storage", "pause"): 1,
    ("storage", "slow"): 1,
    ("score", "kill"): 3,
    ("score", "stop"): 2,
    ("score", "pause"): 1,
    # Nobody watches a driver that is suspended for ever, so there is nothing to wait for.
    ("driver", "kill"): 3,
    ("driver", "pause"): 1,
    ("engine", "kill"): 3,
    ("engine", "stop"): 2,
    ("engine", "cut"): 3,
    ("engine", "slow"): 1,
}
"""How often each fault is drawn."""

EVENTS = (
    "dispatched",
    "put",
    "claimed",
    "batch_taken",
    "step_started",
    "step_ended",
    "publish_started",
    "checkpointed",
)
"""Events after which a fault may come; the log shows them up to 0.2 s late."""

STARTING = "starting"
"""The moment at which a part has a process and the run has not taken a step yet; only for kills."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`which` chooses among several processes of a part; `seconds` is how long a pause or slowness lasts."""

    number: int
    part: Part
    kind: Kind
    moment: str
    delay_s: float
    which: int
    seconds: float

    def __str__(self) -> str:
        when = "while the run starts" if self.moment == STARTING else f"{self.delay_s:.2f} s after {self.moment}"
        return f"{self.kind} {self.part} {when}"


def draw(seed: int, *, limit_s: float, parts: Sequence[Part] = PARTS) -> Iterator[Fault]:
    """Yield faults without end. A pause is at most half of `limit_s`, after which a part counts as dead.

    The first faults are all parts, killed, in a random order, so that a short session has each of them.
    """
    rng = random.Random(seed)
    first: list[tuple[Part, Kind]] = [(part, "kill") for part in parts]
    rng.shuffle(first)
    weights = {fault: weight for fault, weight in _WEIGHTS.items() if fault[0] in parts}
    number = 0
    while True:
        number += 1
        part, kind = first.pop() if first else rng.choices(list(weights), list(weights.values()))[0]
        early = kind == "kill" and part != "engine" and rng.random() < 0.15
        yield Fault(
            number,
            part,
            kind,
            STARTING if early else rng.choice(EVENTS),
            delay_s=rng.uniform(0.0, 0.6),
            which=rng.randrange(1000),
            seconds=rng.uniform(0.1, 0.5) * limit_s,
        )
