"""What every test needs: the environment of a run on one node, before Ray is imported, and little garbage collection.

Whole folders run in two processes. What starts Ray is one group of pytest-xdist's (`tests/integration/conftest.py`), so
that there is one cluster and one process that uses it, while the other process runs all else.

Hundreds of thousands of objects live as long as the process (modules, models, strategies). Walking them
again and again was a tenth of the unit tests' time.
"""

import gc
from pathlib import Path

import pytest

from asyncrl.engine.lifecycle.process_env import prepare

prepare(threads=1)
gc.set_threshold(100_000, 20, 20)

WORKERS = 2


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two for folders, none for files that are named: to import torch twice would cost more than it saves."""
    return WORKERS if any(Path(word).is_dir() for word in config.args) else 0


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Take what the imports made out of the collector's sight."""
    gc.collect()
    gc.freeze()
