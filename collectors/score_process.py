"""Scoring in processes that can be killed, so that no reward's code can stop the collector.

    collector's loop ──group──▶ thread, one per process ──response──▶ process (score_worker.py)
                     ◀─outcomes─        time-out: kill   ◀─outcome──

Invariants: a response that hangs or kills its process fails alone, within its time-out; the next one finds a
new process; no process outlives the collector's.
"""

import asyncio
import base64
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection

from asyncrl.collectors.outcome import Outcome, Rules, SampleFailure, all_failed
from asyncrl.collectors.question import Judge, Question
from asyncrl.collectors.score_answers import decode
from asyncrl.collectors.score_worker import READY
from asyncrl.collectors.scoring import Place

_GRACE_S = 1.0
# The kernel counts milliseconds in 32 bits: 24 days.
_LONGEST_WAIT_S = 1e6

# Run by a new interpreter, which then finds modules where this one does.
_BOOT = """
import base64, pickle, sys
sys.path[:], fd = pickle.loads(base64.b64decode(sys.argv[1]))
from asyncrl.collectors.score_worker import serve
serve(fd)
"""


class ScoreProcess:
    """One process that scores, started again after it was killed. Its calls block; one thread at a time."""

    def __init__(self, build: Callable[[], Judge], rules: Rules, *, start_timeout_s: float) -> None:
        self._given = pickle.dumps((build, rules))
        self._rules = rules
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._line: Connection | None = None
        self._ready = False
        self.fault: SampleFailure | None = None
        """Why the process could not start, the last time that it was tried."""
        self._closed = False
        # A kill from the collector's loop, and a start in a scoring thread.
        self._turn = threading.Lock()

    def start(self) -> None:
        """Start the process, if there is none; it gets ready by itself."""
        with self._turn:
            if self._process is not None or self._closed:
                return
            ours, theirs = socket.socketpair()
            with theirs:
                boot = base64.b64encode(pickle.dumps((sys.path, theirs.fileno())))
                # A session of its own: Ctrl-C in a terminal is the run's business, not a score's.
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _BOOT, boot],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            self._line = Connection(ours.detach())
            self._line.send_bytes(self._given)
            self._ready = False

    def judge(self, question: Question) -> list[Outcome]:
        """Answer one question. A process that dies or takes too long fails its responses, and is replaced."""
        try:
            asked = pickle.dumps(question)
        except Exception as error:  # The edge of user code: an answer that cannot travel to another process.
            return all_failed(question, self._rules.failed(error))
        try:
            self.start()
            line = self._line
            if line is None:
                return all_failed(question, self._rules.failed("scoring has ended"))
            fault = self.fault = self._fault_of_start(line)
            if fault is not None:
                # The next group may try again; each response of this one would wait as long.
                self.kill()
            else:
                line.send_bytes(asked)
                if line.poll(min(self._rules.timeout_s, _LONGEST_WAIT_S)):
                    return decode(line.recv_bytes(), len(question.responses))
                fault = self._rules.late()
                self._replace()
        except ValueError as error:  # What came is not an outcome: the code that it runs wrote to its line.
            fault = self._rules.failed(error)
            self._replace()
        except (EOFError, OSError):
            fault = self._rules.failed(f"the process that scores ended while it scored, {self._replace(hung_up=True)}")
        return all_failed(question, fault)

    def close(self) -> None:
        """Kill the process for good."""
        self._closed = True
        self.kill()

    def kill(self) -> str:
        """Kill the process with all that it started; returns how it had ended, if it had.

        The line is left to whoever still listens, who hears the hang-up.
        """
        with self._turn:
            process, self._process, self._line = self._process, None, None
            if process is None:
                return "killed"
            ended = process.poll()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if ended is None:
            return "killed"
        return f"by signal {signal.Signals(-ended).name}" if ended < 0 else f"with exit code {ended}"

    def _replace(self, *, hung_up: bool = False) -> str:
        process = self._process
        if hung_up and process is not None:
            # It hung up and is about to end by itself, with a code that says why.
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        how = self.kill()
        self.start()
        return how

    def _fault_of_start(self, line: Connection) -> SampleFailure | None:
        """Wait until the process has built its task; say what went wrong."""
        if self._ready:
            return None
        if not line.poll(self._start_timeout_s):
            return self._rules.failed(f"the process that scores did not start within {self._start_timeout_s:g} s")
        answer = line.recv_bytes()
        fault = None if answer == READY else decode(answer, 1)[0]
        self._ready = fault is None
        if fault is not None and not isinstance(fault, SampleFailure):
            raise ValueError("the process that scores gave a reward before it was asked for one")
        return fault


class ProcessScorer(Place):
    """`processes` score, one group each at a time; the others wait in the order in which they came.

    Each process scores by what `build` makes in it. The wait needs no limit of its own: a group ahead takes `timeout_s`
    per sample at most. The threads live as long as the scorer, since the kernel kills a process with the thread that
    started it.
    """

    def __init__(self, build: Callable[[], Judge], rules: Rules, *, processes: int, start_timeout_s: float) -> None:
        self._all = [ScoreProcess(build, rules, start_timeout_s=start_timeout_s) for _ in range(processes)]
        self._idle = deque(self._all)
        self._threads = ThreadPoolExecutor(processes, "score")
        for process in self._all:
            # Early, beside whatever else the collector's start takes.
            self._threads.submit(process.start)

    async def ask(self, questions: Sequence[Question]) -> list[Outcome]:
        given_up = threading.Event()
        try:
            return await asyncio.wrap_future(self._threads.submit(self._answers, questions, given_up))
        finally:
            # A cancelled group's thread ends with the response that it is at.
            given_up.set()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._all:
            process.close()

    def _answers(self, questions: Sequence[Question], given_up: threading.Event) -> list[Outcome]:
        # As many threads as processes: one is always idle here.
        process = self._idle.popleft()
        try:
            outcomes: list[Outcome] = []
            for question in questions:
                if given_up.is_set():
                    break
                outcomes += process.judge(question)
                if outcomes[-1] is process.fault:
                    return [process.fault for asked in questions for _ in asked.responses]
            return outcomes
        finally:
            self._idle.append(process)
