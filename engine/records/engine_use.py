"""What the engine of one collector has done, as a put notice tells it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineUse:
    """Seconds and tokens are totals since the collector's first grant, of which `up_s` have passed; the rest is of now.

    `busy_s` is the time with something to decode and no pause. `running` and `waiting` count requests, one per sample;
    `cache_used` is a share of the cache's memory.
    """

    up_s: float = 0.0
    busy_s: float = 0.0
    paused_s: float = 0.0
    tokens: int = 0
    running: int = 0
    waiting: int = 0
    cache_used: float = 0.0
