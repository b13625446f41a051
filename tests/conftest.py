"""What every test needs: the environment of a run on one node, before Ray is imported, and little garbage collection.

Hundreds of thousands of objects live as long as the process (modules, models, strategies). Walking them
again and again was a tenth of the unit tests' time.
"""

import gc

import pytest

from asyncrl.engine.lifecycle.process_env import prepare

prepare(threads=1)
gc.set_threshold(100_000, 20, 20)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Take what the imports made out of the collector's sight."""
    gc.collect()
    gc.freeze()
