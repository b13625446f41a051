"""Virtual time, for tests; see `asyncrl.engine.virtual_time`."""

from asyncrl.engine.virtual_time import Stalled, VirtualLoop, run_virtual, virtual_clock

__all__ = ["Stalled", "VirtualLoop", "run_virtual", "virtual_clock"]
