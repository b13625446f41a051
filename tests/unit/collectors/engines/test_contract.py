"""The contract of engines, held by the native engine, per family of models, and by the scripted one."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
import numpy as np
import pytest
from tests.unit.collectors.engines.conftest import FAMILIES, native_trial, running

from asyncrl.engine.testing.engine_contract import CONTRACT, EXACT, TEACHING, EngineTest, Trial
from asyncrl.engine.testing.scripted_engine import ScriptedEngine

_LIMIT_S = 30.0


@asynccontextmanager
async def scripted_trial() -> AsyncIterator[Trial]:
    states = [{"first": np.full(4, version), "last": np.full((2, 2), version)} for version in range(2)]
    async with running(ScriptedEngine(states[0], token_s=0.001)) as engine:
        yield Trial(engine, states=states, vocabulary=32, long_tokens=40)


def hold(trial: AbstractAsyncContextManager[Trial], test: EngineTest) -> None:
    async def held() -> None:
        with anyio.fail_after(_LIMIT_S):
            async with trial as running_trial:
                await test(running_trial)

    anyio.run(held)


@pytest.mark.parametrize("test", CONTRACT, ids=lambda test: test.__name__)
def test_scripted_engine(test: EngineTest) -> None:
    hold(scripted_trial(), test)


@pytest.mark.parametrize("test", [*CONTRACT, *EXACT], ids=lambda test: test.__name__)
def test_native_engine(test: EngineTest) -> None:
    hold(native_trial(), test)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("test", TEACHING, ids=lambda test: test.__name__)
def test_native_engine_of_each_family(test: EngineTest, family: str) -> None:
    hold(native_trial(family), test)
