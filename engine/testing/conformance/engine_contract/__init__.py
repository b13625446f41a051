"""What every engine must do, as one suite: async functions of a trial, named as sentences.

Tests parametrize over `CONTRACT`; over `TEACHING` with engines that hold a model, over `EXACT` with those whose batches
repeat to the bit, and over `SLEEP` with those that can leave their device. Each function leaves the engine as it found
it but for its version, so that they can share one that is slow to start.
"""

from collections.abc import Awaitable, Callable

from asyncrl.engine.testing.conformance.engine_contract.control import CONTROL
from asyncrl.engine.testing.conformance.engine_contract.exact import EXACT
from asyncrl.engine.testing.conformance.engine_contract.sleep import SLEEP
from asyncrl.engine.testing.conformance.engine_contract.streams import STREAMS
from asyncrl.engine.testing.conformance.engine_contract.teaching import TEACHING, model_teacher
from asyncrl.engine.testing.conformance.engine_contract.trial import (
    Stream,
    Teacher,
    Trial,
    check_near,
    check_result,
    reading,
    tiles,
)

EngineTest = Callable[[Trial], Awaitable[None]]

CONTRACT: tuple[EngineTest, ...] = (*STREAMS, *CONTROL)

__all__ = [
    "CONTRACT",
    "EXACT",
    "SLEEP",
    "TEACHING",
    "EngineTest",
    "Stream",
    "Teacher",
    "Trial",
    "check_near",
    "check_result",
    "model_teacher",
    "reading",
    "tiles",
]
