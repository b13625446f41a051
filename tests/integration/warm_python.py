"""A program of the tests: a Python that has imported what is slow, and becomes other Pythons, one fork each.

Reads one JSON object per line (`words` as after `python`, `cwd`, `out`, `err`), and writes one line per
object: the exit code. A run of a second would otherwise wait ten for torch.
"""

import json
import os
import runpy
import sys
import traceback
from importlib import import_module
from types import ModuleType
from typing import NoReturn


def warm_up() -> None:
    for name in (
        "torch.distributed",
        "transformers.models.llama.modeling_llama",
        "asyncrl.engine.cli",
        "asyncrl.engine.lifecycle.local",
        "asyncrl.engine.testing.trace",
        "asyncrl.engine.trace.loss_inputs",
    ):
        import_module(name)


def become(words: list[str], cwd: str, out: str, err: str) -> NoReturn:
    """Run as `python WORDS` would in that folder, and end the process."""
    code = 1
    try:
        os.setsid()
        os.chdir(cwd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        run(words)
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(end.code + "\n")
        code = 0 if end.code is None else end.code if isinstance(end.code, int) else 1
    except BaseException:  # The fork's edge: Python would print it and end with 1.
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(words: list[str]) -> None:
    option, program, *rest = words
    sys.path[0] = ""
    if option == "-m":
        sys.argv = [program, *rest]
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *rest]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(program, main.__dict__)


if __name__ == "__main__":
    warm_up()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            become(**json.loads(line))
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()
