"""A Ray cluster of two raylets on this host, for runs that join it."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


class Raylets:
    """The cluster, by its address."""

    def __init__(self, stderr: Path, *cpus: int) -> None:
        self._stderr = stderr
        with stderr.open("w") as said:
            self._process = subprocess.Popen(
                [sys.executable, HERE / "local_raylets.py", *map(str, cpus)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )
        self.address: str = self._answer()["address"]
        self._before = self.there()

    def there(self) -> dict[str, Any]:
        """Return the living actors and the placement groups on it."""
        return self._ask("")

    def add(self, cpus: int) -> None:
        """Add a node."""
        self._ask(f"add {cpus}")

    def drain_last(self, seconds: int) -> None:
        """Tell Ray that the node that was added last ends in so many seconds."""
        self._ask(f"drain {seconds}")

    def wait_until_empty(self, timeout_s: float) -> None:
        """Wait until it is as it was before any run."""
        deadline = time.monotonic() + timeout_s
        while (found := self.there()) != self._before:
            assert time.monotonic() < deadline, found
            time.sleep(0.2)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(60)

    def _ask(self, order: str) -> dict[str, Any]:
        assert self._process.stdin
        self._process.stdin.write(f"{order}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, self._stderr.read_text(encoding="utf-8")[-3000:]
        answer: dict[str, Any] = json.loads(line)
        return answer


@pytest.fixture(scope="session")
def raylets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Raylets]:
    """Two nodes of four CPUs each."""
    raylets = Raylets(tmp_path_factory.mktemp("raylets") / "stderr", 4, 4)
    yield raylets
    raylets.close()
