"""A program of the tests: a Python that has imported what is slow, and becomes other Pythons, one fork each.

Reads one JSON object per line (`words` as after `python`, `cwd`, `out`, `err`, `ray`), and writes one line per object:
the fork's process id. When the fork has ended, its exit code is in the file `code` beside `out`. A run of a second
would otherwise wait ten for torch; with `ray` also Ray's workers are forks.
"""

import gc
import json
import os
import runpy
import select
import signal
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NoReturn

# It lies beside this program.
nursery = import_module("ray_nursery")


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
    nursery.warm_up()
    # A collection would touch, and so copy, every page of every fork.
    gc.collect()
    gc.freeze()


def become(words: list[str], cwd: str, out: str, err: str, ray: bool) -> NoReturn:
    """Run as `python WORDS` would in that folder, and end the process."""
    code = 1
    try:
        os.setsid()
        os.chdir(cwd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        # Under `nohup` the tests ignore it, and so would a run.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        if ray:
            nursery.forked_workers(Path(out).parent)
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


def note(code: int, path: Path) -> None:
    new = path.with_name("code.new")
    with suppress(FileNotFoundError):  # Who asked killed the fork, and took the folder away.
        new.write_text(str(code), encoding="utf-8")
        new.rename(path)


def main() -> None:
    warm_up()
    asked = os.fdopen(0, "rb", buffering=0)
    forks: dict[int, tuple[int, Path]] = {}
    while True:
        ready, _, _ = select.select([0, *forks], [], [])
        for number in ready:
            if number in forks:
                pid, path = forks.pop(number)
                os.close(number)
                note(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), path)
                continue
            line = asked.readline()
            if not line:  # The tests have ended, or were killed.
                for pid, _ in forks.values():
                    os.kill(pid, signal.SIGKILL)
                return
            words = json.loads(line)
            pid = os.fork()
            if pid == 0:
                become(**words)
            forks[os.pidfd_open(pid)] = pid, Path(words["out"]).with_name("code")
            sys.stdout.write(f"{pid}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
