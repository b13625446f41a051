"""Scoring in processes that can be killed, so that no reward's code can stop the collector.

    collector's loop ──group──▶ thread, one per process ──group────▶ process (score_worker.py)
                     ◀─outcomes─        time-out: kill   ◀─outcome──, one by one

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
from dataclasses import dataclass
from multiprocessing.connection import Connection

from asyncrl.collectors.outcome import Outcome, Rules, SampleFailure, all_failed
from asyncrl.collectors.question import Judge, Question
from asyncrl.collectors.score_answers import decode
from asyncrl.collectors.score_worker import READY, STOP, STOPPED
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


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question, at its place among others, and as it travels."""

    place: int
    question: Question
    pickled: bytes


class ScoreProcess:
    """One process that scores, started again after it was killed. Its calls block; one thread at a time."""

    def __init__(self, build: Callable[[], Judge], rules: Rules, *, start_timeout_s: float) -> None:
        self._given = pickle.dumps((build, rules))
        self._rules = rules
        self._start_timeout_s = start_timeout_s
        self._wait_s = min(rules.timeout_s, _LONGEST_WAIT_S)
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

    def judge(self, questions: Sequence[Question], given_up: threading.Event) -> list[Outcome]:
        """Answer questions, unless they are given up in the meantime: that ends with the one that is under way.

        A process that dies or takes too long fails the responses of its question, and is replaced for the rest.
        """
        answers: dict[int, list[Outcome]] = {}
        left: deque[_Asked] = deque()
        for place, question in enumerate(questions):
            try:
                left.append(_Asked(place, question, pickle.dumps(question)))
            except Exception as error:  # The edge of user code: an answer that cannot travel to another process.
                answers[place] = all_failed(question, self._rules.failed(error))
        while left and not given_up.is_set():
            fault = self._answers(left, answers, given_up)
            if fault is None:
                continue
            # Who waits for a process that does not start would wait as long for each response.
            for asked in left if fault is self.fault else [left[0]]:
                answers[asked.place] = all_failed(asked.question, fault)
            for _ in range(len(left) if fault is self.fault else 1):
                left.popleft()
        return [outcome for place in sorted(answers) for outcome in answers[place]]

    def _answers(
        self, left: "deque[_Asked]", answers: dict[int, list[Outcome]], given_up: threading.Event
    ) -> SampleFailure | None:
        """Ask all at once, since a message takes longer than many a score; return what became of the first one left."""
        try:
            line = self._ready_line()
            if line is None:
                return self.fault
            line.send_bytes(pickle.dumps([asked.pickled for asked in left]))
            while left:
                if not line.poll(self._wait_s):
                    self._replace()
                    return self._rules.late()
                asked = left[0]
                answers[asked.place] = decode(line.recv_bytes(), len(asked.question.responses))
                left.popleft()
                if left and given_up.is_set():
                    self._stop(line)
                    return None
        except ValueError as error:  # What came is not an outcome: the code that it runs wrote to its line.
            self._replace()
            return self._rules.failed(error)
        except (EOFError, OSError):
            return self._rules.failed(f"the process that scores ended while it scored, {self._replace(hung_up=True)}")
        return None

    def _ready_line(self) -> Connection | None:
        """Return the line to a process that has built what scores; None if there is none, as `fault` says."""
        self.start()
        line = self._line
        self.fault = self._rules.failed("scoring has ended") if line is None else self._fault_of_start(line)
        if self.fault is None:
            return line
        # The next group may try again.
        self.kill()
        return None

    def _stop(self, line: Connection) -> None:
        """Have the process leave out what it was asked for, but for what it is at."""
        line.send_bytes(STOP)
        while line.poll(self._wait_s):
            if line.recv_bytes() == STOPPED:
                return
        self._replace()

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
            return process.judge(questions, given_up)
        finally:
            self._idle.append(process)
