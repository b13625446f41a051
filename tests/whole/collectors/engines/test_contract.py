"""The contract of engines, held by the native engine, per family of models, and by the scripted one."""

from contextlib import AbstractAsyncContextManager

import anyio
import pytest

from asyncrl.engine.testing.conformance.engine_contract import CONTRACT, EXACT, SLEEP, TEACHING, EngineTest, Trial
from asyncrl.engine.testing.conformance.engine_trials import FAMILIES, native_trial, scripted_trial

_LIMIT_S = 60.0


def hold(trial: AbstractAsyncContextManager[Trial], *tests: EngineTest) -> None:
    async def held() -> None:
        with anyio.fail_after(_LIMIT_S):
            async with trial as running_trial:
                for test in tests:
                    await test(running_trial)

    anyio.run(held)


@pytest.mark.parametrize("test", [*CONTRACT, *SLEEP], ids=lambda test: test.__name__)
def test_scripted_engine(test: EngineTest) -> None:
    hold(scripted_trial(), test)


@pytest.mark.parametrize("test", [*CONTRACT, *EXACT, *SLEEP], ids=lambda test: test.__name__)
def test_native_engine(test: EngineTest) -> None:
    hold(native_trial(), test)


@pytest.mark.parametrize("test", [*CONTRACT, *EXACT, *SLEEP], ids=lambda test: test.__name__)
def test_native_engine_with_a_burst_ahead(test: EngineTest) -> None:
    """As on a GPU."""
    hold(native_trial(ahead=1, burst=2), test)


@pytest.mark.parametrize("family", FAMILIES)
def test_native_engine_of_each_family(family: str) -> None:
    hold(native_trial(family), *TEACHING, *SLEEP[:1])
