"""A part of the program warm_python.py: Ray's workers as forks of a Python that has imported what they need.

`forked_workers` puts a program in the place of `sys.executable`. Ray starts its workers by it, and each of them asks
the nursery for a fork, hands over all that a process has from its parent (environment, folder, files, signals,
priority, group), and ends when the fork ends. A fork whose asker is killed is killed too, also if it is suspended: Ray
means the fork. Whatever else Ray starts becomes an ordinary Python. A worker would
otherwise import torch and transformers for seven seconds, and a run has five.
"""

import atexit
import ctypes
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1

_SHIM = """#!{python} -IS
import json, os, signal, socket, sys
words = sys.argv[1:]
first = next((i for i, word in enumerate(words) if word.endswith("/default_worker.py")), None)
if first is None:
    os.execv({python!r}, [{python!r}, *words])
told = dict(
    words=[word for word in words[first:] if not word.startswith(("--serialized-runtime-env-context=", "--language="))],
    env=dict(os.environ), folder=os.getcwd(), group=os.getpgid(0), nice=os.nice(0),
    mask=sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
)
with socket.socket(socket.AF_UNIX) as asked:
    asked.connect({address!r})
    socket.send_fds(asked, [b"f"], [0, 1, 2])
    asked.sendall(json.dumps(told).encode())
    asked.shutdown(socket.SHUT_WR)
    asked.recv(1)  # Nothing comes: the worker has ended.
"""


def warm_up() -> None:
    """Import what a worker needs, but for Ray: it reads, as it is imported, what its parent tells the worker."""
    for name in (
        "tensordict",
        "torch.distributed",
        "transformers.models.llama.modeling_llama",
        "asyncrl.engine.lifecycle.parts",
    ):
        import_module(name)
    assert "ray" not in sys.modules


def forked_workers(folder: Path) -> None:
    """Let Ray start workers of this process from a nursery, which ends with this process; its files go to `folder`."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "nursery"))
    listener.listen(64)
    if os.fork() == 0:
        _serve(listener)
    listener.close()
    shim = folder / "python"
    shim.write_text(_SHIM.format(python=sys.executable, address=str(folder / "nursery")), encoding="utf-8")
    shim.chmod(0o700)
    sys.executable = str(shim)


def _serve(listener: socket.socket) -> NoReturn:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for ignored in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    # By each of their two file numbers: who asked, and the fork.
    forks: dict[int, tuple[socket.socket, int]] = {}
    ends = select.poll()
    ends.register(listener, select.POLLIN)
    while True:
        for number, _ in ends.poll():
            if number in forks:
                _part(forks, ends, *forks[number])
            elif number == listener.fileno():
                asked, _ = listener.accept()
                pid = os.fork()
                if pid == 0:
                    listener.close()
                    # Who holds a connection open keeps its asker from hearing of an end.
                    for other, fork in forks.values():
                        other.close()
                        with suppress(OSError):
                            os.close(fork)
                    _work(asked)
                both = asked, os.pidfd_open(pid)
                ends.register(asked, 0)  # That the other side is gone is told unasked.
                ends.register(both[1], select.POLLIN)
                forks[asked.fileno()] = forks[both[1]] = both


def _part(forks: dict[int, tuple[socket.socket, int]], ends: select.poll, asked: socket.socket, fork: int) -> None:
    """End what is left of the two, of which one has ended."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(fork, signal.SIGKILL)
    for number in (asked.fileno(), fork):
        del forks[number]
        ends.unregister(number)
    asked.close()
    os.close(fork)


def _work(asked: socket.socket) -> NoReturn:
    _, files, _, _ = socket.recv_fds(asked, 1, 3)
    told: dict[str, Any] = json.loads(asked.makefile("rb").read())
    signal.pthread_sigmask(signal.SIG_SETMASK, told["mask"])
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        os.setpgid(0, told["group"])
    except PermissionError:  # A group of another session. Ray kills the whole group of a worker that it kills.
        os.setpgid(0, 0)
    os.nice(told["nice"] - os.nice(0))
    os.environ.clear()
    os.environ.update(told["env"])
    os.chdir(told["folder"])
    for place, file in enumerate(files):
        os.dup2(file, place)
        os.close(file)
    sys.argv = told["words"]
    code: Any = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:  # The fork's edge: Python would print it and end with 1.
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    os._exit(code if isinstance(code, int) else bool(code))
