"""Plant small faults, one at a time, in a copy of the tree, and say which of them no unit test notices.

    scripts/mutate [--list] [--only NAME ...] [--jobs 2] [--deadline-s 60] [--no-baseline]

The faults stand in `tests/mutations/*.toml` (see mutations.py); the tree itself is never touched. First
the tests that they name must pass without a fault; then each fault is planted in a copy of its own and its
tests run until one fails. A line per fault; the last line is one JSON object. Exit code 1 if a fault
survives, 2 if one cannot be planted, or its tests cannot be run.

What all tests import (torch, pytest) is imported once, here; each run is a fork of this process, which has
not imported asyncrl.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from mutations import ROOT, BadMutation, Mutation, catalogue

_COPIED = ("collectors", "configs", "docs", "engine", "filters", "scripts", "src", "tests", "trainers")
_PYTEST = ("-x", "-q", "--tb=line", "-rfE", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-seed=0")
_PASSED, _FAILED, _HUNG = 0, 1, -signal.SIGKILL


def copy_tree(source: Path, target: Path) -> Path:
    """Copy what the tests need; links stay links, so that `asyncrl` in the copy is the copy's own code."""
    target.mkdir()
    for name in _COPIED:
        shutil.copytree(source / name, target / name, symlinks=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.startswith("."):
            shutil.copy2(file, target / file.name)
    return target


@dataclass
class Running:
    """One pytest in a fork of this process, its output in a file beside its tree."""

    tree: Path
    tests: Sequence[str]
    deadline_s: float

    def start(self) -> None:
        self.output = self.tree.with_suffix(".txt")
        self.began = time.monotonic()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._run()

    def _run(self) -> NoReturn:
        """Become a pytest of the copy; never return."""
        code = 3
        try:
            os.setsid()
            out = os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for number in (1, 2):
                os.dup2(out, number)
            os.chdir(self.tree)
            sys.path.insert(0, str(self.tree / "src"))
            os.environ["PYTHONPATH"] = str(self.tree / "src")
            import pytest

            import asyncrl

            if Path(asyncrl.__file__).parents[2] != self.tree:
                raise RuntimeError(f"asyncrl comes from {asyncrl.__file__}, not from the copy in {self.tree}")
            code = pytest.main([*_PYTEST, *self.tests])
        except BaseException:  # The fork's edge: its parent reads the text and the code.
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        """Return the exit code, -9 past the deadline, None while it runs. No process of it is left then."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        late = time.monotonic() - self.began > self.deadline_s
        if not pid and not late:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if not pid:
            os.waitpid(self.pid, 0)
            return _HUNG
        return os.waitstatus_to_exitcode(status)

    @property
    def failed_test(self) -> str:
        for line in self.output.read_text(errors="replace").splitlines():
            if line.startswith(("FAILED ", "ERROR ")):
                return line.split()[1]
        return "a test"

    @property
    def tail(self) -> str:
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-25:])


def plant(mutation: Mutation, base: Path, target: Path) -> Path:
    """Copy the tree with a fault in it; BadMutation if it does not fit."""
    text = mutation.planted(base)
    copy_tree(base, target)
    file = target / mutation.file
    file.write_text(text)
    # A byte-code file is told by time and size alone, and both can be the same.
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        compiled.unlink()
    return target


def tried(
    mutations: Sequence[Mutation], base: Path, *, jobs: int, deadline_s: float
) -> Iterator[tuple[Mutation, Running, int]]:
    """Run each mutation's tests, `jobs` at a time; yield it with its exit code as it ends."""
    waiting = list(enumerate(mutations))
    running: list[tuple[Mutation, Running]] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                number, mutation = waiting.pop(0)
                tree = plant(mutation, base, base.parent / f"{number}")
                run = Running(tree, mutation.tests, deadline_s)
                run.start()
                running.append((mutation, run))
            time.sleep(0.02)
            for mutation, run in list(running):
                code = run.poll()
                if code is not None:
                    running.remove((mutation, run))
                    yield mutation, run, code
                    shutil.rmtree(run.tree)
    finally:
        for _, run in running:
            run.deadline_s = 0
            run.poll()


def passes_unchanged(base: Path, tests: Iterable[str], *, deadline_s: float) -> bool:
    """Say whether the tests pass without a fault; their output goes out if not."""
    run = Running(base, list(dict.fromkeys(tests)), deadline_s)
    run.start()
    while (code := run.poll()) is None:
        time.sleep(0.02)
    if code != _PASSED:
        print(run.tail)
    return code == _PASSED


def warm() -> None:
    """Import what every test needs and nothing of asyncrl."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["OMP_WAIT_POLICY"] = "passive"
    import anyio  # noqa: F401
    import hypothesis  # noqa: F401
    import msgspec  # noqa: F401
    import pydantic  # noqa: F401
    import pytest  # noqa: F401
    import structlog  # noqa: F401
    import torch  # noqa: F401


def chosen(names: Sequence[str]) -> list[Mutation]:
    """Return the mutations whose names have one of `names` in them, or all."""
    known = catalogue()
    for name in names:
        if not any(name in mutation.name for mutation in known):
            raise BadMutation(f"no mutation has {name!r} in its name; --list shows all")
    return [mutation for mutation in known if not names or any(name in mutation.name for name in names)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="show the faults; each is planted, and no test is run")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="those whose names contain this")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="faults at a time")
    parser.add_argument("--deadline-s", type=float, default=60.0, help="seconds per fault; a hang counts as noticed")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests without a fault first")
    options = parser.parse_args(arguments)
    try:
        mutations = chosen(options.only)
        for mutation in mutations:
            mutation.planted(ROOT)
            if options.list:
                print(f"{mutation.name}: {mutation.function}: {mutation.pattern!r} -> {mutation.replacement!r}")
    except BadMutation as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if options.list else run_all(mutations, options)


def run_all(mutations: Sequence[Mutation], options: argparse.Namespace) -> int:
    began = time.monotonic()
    real = [mutation for mutation in mutations if not mutation.equivalent]
    survived: list[str] = []
    warm()
    with tempfile.TemporaryDirectory(prefix="asyncrl-mutate-") as folder:
        base = copy_tree(ROOT, Path(folder).resolve() / "base")
        tests = (test for mutation in real for test in mutation.tests)
        if not options.no_baseline and not passes_unchanged(base, tests, deadline_s=10 * options.deadline_s):
            print("error: the tests do not pass without a fault", file=sys.stderr)
            return 2
        for mutation, run, code in tried(real, base, jobs=options.jobs, deadline_s=options.deadline_s):
            seconds = f"{time.monotonic() - run.began:.1f} s"
            if code == _PASSED:
                survived.append(mutation.name)
                print(f"{mutation.name}: SURVIVED {' '.join(mutation.tests)} ({seconds})", flush=True)
            elif code == _FAILED:
                print(f"{mutation.name}: killed by {run.failed_test} ({seconds})", flush=True)
            elif code == _HUNG:
                print(f"{mutation.name}: killed by the deadline of {options.deadline_s:g} s", flush=True)
            else:
                print(run.tail)
                print(f"error: {mutation.name}: pytest ended with code {code}", file=sys.stderr)
                return 2
    for mutation in mutations:
        if mutation.equivalent:
            print(f"{mutation.name}: no fault: {mutation.equivalent}")
    result = {
        "mutations": len(real),
        "killed": len(real) - len(survived),
        "survived": survived,
        "equivalent": len(mutations) - len(real),
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(result))
    return _FAILED if survived else _PASSED


if __name__ == "__main__":
    sys.exit(main())
