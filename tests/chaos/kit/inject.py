"""Does one fault to one process."""

import time
from contextlib import suppress

import psutil

from kit.plan import Fault

_STOPPED_S, _RUNS_S = 0.15, 0.05
"""A slow process gets a quarter of the time."""


def inject(fault: Fault, victim: psutil.Process) -> None:
    """Break a process; a pause and slowness are over when this returns."""
    # It may be gone: the fault before had a late consequence.
    with suppress(psutil.NoSuchProcess):
        match fault.kind:
            case "kill":
                victim.kill()
            case "stop":
                victim.suspend()
            case "pause":
                victim.suspend()
                time.sleep(fault.seconds)
                victim.resume()
            case "cut":
                """The session cuts the socket before the process."""
            case "slow":
                until = time.monotonic() + 2 * fault.seconds
                while time.monotonic() < until:
                    victim.suspend()
                    time.sleep(_STOPPED_S)
                    victim.resume()
                    time.sleep(_RUNS_S)
