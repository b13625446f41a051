"""The process that scores: builds the task, then answers (prompt, response) with an outcome, one at a time.

It imports no torch unless the task does, and ends with the collector's process, also while it scores.
"""

import ctypes
import os
import pickle
import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from asyncrl.collectors.outcome import Rules, judged
from asyncrl.collectors.score_answers import encode
from asyncrl.collectors.tasks.load import load_task

_PR_SET_PDEATHSIG = 1
READY = b""
"""The first answer of a process that has built its task."""


def serve(fd: int) -> None:
    """Take the task's options and rules, then answer until the other side hangs up.

    The first answer is READY, or says why the task could not be built.
    """
    _end_with_parent()
    # Programs that a score starts must not hold the line open after this process has died.
    os.set_inheritable(fd, False)
    line = Connection(fd)
    given: tuple[Mapping[str, Any], Rules] = pickle.loads(line.recv_bytes())
    options, rules = given
    try:
        task = load_task(rules.task, options)
    except BaseException as error:  # The edge of user code.
        line.send_bytes(encode(rules.failed(error)))
        return
    line.send_bytes(READY)
    while True:
        try:
            asked = line.recv_bytes()
        except EOFError:
            return
        try:
            prompt, response = pickle.loads(asked)
            answer = encode(judged(task, prompt, response, rules))
        except BaseException as error:  # The edge of user code: a class of the user's in the prompt or the extras.
            answer = encode(rules.failed(error))
        line.send_bytes(answer)


def _end_with_parent() -> None:
    """Have the kernel kill this process with the thread that started it: a score that hangs reads no hang-up."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux has it; elsewhere a score that hangs stays.
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
