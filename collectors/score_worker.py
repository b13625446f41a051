"""The process that scores: builds what scores, then answers questions with outcomes, one at a time.

It imports no torch unless what scores does, and ends with the collector's process, also while it scores.
"""

import ctypes
import os
import pickle
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection

from asyncrl.collectors.outcome import Rules, judged
from asyncrl.collectors.question import Judge, Question
from asyncrl.collectors.score_answers import encode

_PR_SET_PDEATHSIG = 1
READY = b""
"""The first answer of a process that has built what scores."""


def serve(fd: int) -> None:
    """Take what builds the judge, and the rules, then answer until the other side hangs up.

    The first answer is READY, or says why it could not be built.
    """
    _end_with_parent()
    # Programs that a score starts must not hold the line open after this process has died.
    os.set_inheritable(fd, False)
    line = Connection(fd)
    given: tuple[Callable[[], Judge], Rules] = pickle.loads(line.recv_bytes())
    build, rules = given
    try:
        judge = build()
    except BaseException as error:  # The edge of user code.
        line.send_bytes(encode([rules.failed(error)]))
        return
    line.send_bytes(READY)
    while True:
        try:
            asked = line.recv_bytes()
        except EOFError:
            return
        responses = 1
        try:
            question: Question = pickle.loads(asked)
            responses = len(question.responses)
            answer = encode(judged(judge, question, rules))
        except BaseException as error:  # The edge of user code: a class of the user's in the prompt or the extras.
            answer = encode([rules.failed(error)] * responses)
        line.send_bytes(answer)


def _end_with_parent() -> None:
    """Have the kernel kill this process with the thread that started it: a score that hangs reads no hang-up."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux has it; elsewhere a score that hangs stays.
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
