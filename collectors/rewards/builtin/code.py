"""`code`: how many of a record's tests the response's program passes, in a process with limits."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from asyncrl.engine.records import Prompt

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_OUTPUT_BYTES = 1_000_000
# Sets the limits on itself, then runs the program as `python program.py` would, but alone (-I).
_BOOT = """
import ctypes, resource, runpy, sys
prctl = getattr(ctypes.CDLL(None), "prctl", None)
if prctl is not None:
    prctl(1, 9)  # Linux kills it with the process that scores, which may be killed at its time limit.
seconds, memory, output = map(int, sys.argv[1:4])
for kind, most in (("CPU", seconds), ("AS", memory), ("FSIZE", output), ("CORE", 0), ("NOFILE", 64)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + kind), (most, most))
sys.argv[:] = ["program.py"]
runpy.run_path("program.py", run_name="__main__")
"""


class Code:
    """The share of tests passed by the response's last fenced block of Python, or by all of it without a block.

    The record's `field` has the tests: a list of maps with `input` (given to standard input; may be left out) and
    `output` (compared with standard output, blanks around both left out). With `all_or_nothing` it is 1 or 0.
    A test may take `seconds` and `memory_mb`. The program runs in an empty folder without our environment. That is not
    a sandbox: it can read files and use the network.
    """

    def __init__(
        self, field: str = "tests", *, seconds: float = 5.0, memory_mb: int = 512, all_or_nothing: bool = False
    ) -> None:
        if seconds <= 0 or memory_mb < 16:
            raise ValueError(f"seconds is {seconds:g} and memory_mb {memory_mb}; they must be over 0 and at least 16")
        self._field = field
        self._seconds = seconds
        self._memory = memory_mb * 2**20
        self._all_or_nothing = all_or_nothing

    def check_prompt(self, prompt: Prompt) -> None:
        """ValueError if the prompt's record has no tests."""
        self._tests(prompt)

    def __call__(self, prompt: Prompt, response: str) -> float:
        tests = self._tests(prompt)
        blocks = _FENCED.findall(response)
        program = blocks[-1] if blocks else response
        if self._all_or_nothing:
            return float(all(self._passes(program, test) for test in tests))
        return sum(self._passes(program, test) for test in tests) / len(tests)

    def _tests(self, prompt: Prompt) -> list[Mapping[str, Any]]:
        tests = prompt.fields.get(self._field)
        # A column of text may hold a list as JSON.
        if isinstance(tests, str):
            with suppress(ValueError):
                tests = json.loads(tests)
        if not (isinstance(tests, list) and tests and all(isinstance(t, Mapping) and "output" in t for t in tests)):
            raise ValueError(
                f"prompt {prompt.id!r} has {tests!r} as its {self._field}; it must be a list of maps with `output`, "
                "and `input` where the program reads some"
            )
        return tests

    def _passes(self, program: str, test: Mapping[str, Any]) -> bool:
        with tempfile.TemporaryDirectory(prefix="asyncrl-code-") as folder, tempfile.TemporaryFile() as output:
            (Path(folder) / "program.py").write_text(program, encoding="utf-8", errors="backslashreplace")
            limits = [str(int(self._seconds) + 1), str(self._memory), str(_OUTPUT_BYTES)]
            # A session of its own, so that what the program starts ends with it.
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", _BOOT, *limits],
                cwd=folder,
                env={"PATH": os.defpath, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                process.communicate(str(test.get("input", "")).encode("utf-8", "backslashreplace"), self._seconds)
            except subprocess.TimeoutExpired:
                return False
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            found = output.read().decode("utf-8", "replace")
        return process.returncode == 0 and found.strip() == str(test["output"]).strip()
