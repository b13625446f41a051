"""The process that scores: builds what scores, then answers questions with outcomes, each by itself.

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
STOP, STOPPED = b"stop", b"stopped"
"""Asks a process to leave out the rest of its questions, and its answer."""


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
        if asked == STOP:
            line.send_bytes(STOPPED)
            continue
        for pickled in pickle.loads(asked):
            line.send_bytes(_answer(judge, pickled, rules))
            if line.poll():
                break


def _answer(judge: Judge, pickled: bytes, rules: Rules) -> bytes:
    """Answer one question; whatever goes wrong fails its responses."""
    responses = 1
    try:
        question: Question = pickle.loads(pickled)
        responses = len(question.responses)
        return encode(judged(judge, question, rules))
    except BaseException as error:  # The edge of user code: a class of the user's in the prompt or the extras.
        return encode([rules.failed(error)] * responses)


def _end_with_parent() -> None:
    """Have the kernel kill this process with the thread that started it: a score that hangs reads no hang-up."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux has it; elsewhere a score that hangs stays.
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
