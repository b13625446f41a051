"""Starts `asyncrl` in a process of its own: as the installed command, or as a fork of a Python that is warm."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol

import psutil

WARM = Path(__file__).parents[2] / "integration" / "warm_python.py"


class Process(Protocol):
    """What a session asks of the driver's process. `poll` returns the exit code, negative for a signal."""

    pid: int

    def poll(self) -> int | None: ...

    def said(self) -> str: ...


class Launcher(Protocol):
    def start(self, folder: Path, words: Sequence[str]) -> Process: ...

    def close(self) -> None: ...


class _Cold:
    def __init__(self, process: "subprocess.Popen[bytes]", out: IO[bytes]) -> None:
        self.pid = process.pid
        self._process = process
        self._out = out

    def poll(self) -> int | None:
        return self._process.poll()

    def said(self) -> str:
        return Path(self._out.name).read_text(encoding="utf-8", errors="replace")


class Cold:
    """Starts a new Python each time, as users do; Ray's workers are new too."""

    def __init__(self) -> None:
        self._count = 0

    def start(self, folder: Path, words: Sequence[str]) -> Process:
        self._count += 1
        out = (folder / f"out-{self._count}.txt").open("wb")
        process = subprocess.Popen(
            [sys.executable, "-m", "asyncrl", *words],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        return _Cold(process, out)

    def close(self) -> None:
        """Nothing is held."""


class _Fork:
    def __init__(self, pid: int, folder: Path) -> None:
        self.pid = pid
        self._folder = folder

    def poll(self) -> int | None:
        with suppress(FileNotFoundError):
            return int((self._folder / "code").read_text(encoding="utf-8"))
        return None

    def said(self) -> str:
        return "".join((self._folder / name).read_text(encoding="utf-8", errors="replace") for name in ("out", "err"))


class Warm:
    """Forks a Python that has imported torch; Ray's workers are forks as well. A start takes a third of the time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, WARM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self._kept = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._count = 0

    def start(self, folder: Path, words: Sequence[str]) -> Process:
        assert self._process.stdin
        assert self._process.stdout
        self._count += 1
        mine = Path(self._kept.name, str(self._count))
        mine.mkdir()
        asked = {"words": ["-m", "asyncrl", *words], "cwd": str(folder), "ray": True}
        asked |= {name: str(mine / name) for name in ("out", "err")}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return _Fork(int(self._process.stdout.readline()), mine)

    def close(self) -> None:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    child.kill()
        self._process.kill()
        self._process.wait()
        self._kept.cleanup()
