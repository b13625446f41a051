"""One session: a run, faults one after the other, and the history at the end.

Invariant: every fault has one outcome, and no process that the session started or suspended outlives it.
"""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from asyncrl.engine.trace.recording import Recording
from asyncrl.engine.trace.replay import replay
from kit import processes, settings
from kit.engines import Engines
from kit.history import History
from kit.inject import inject
from kit.launch import Launcher, Process
from kit.plan import STARTING, Fault, Part
from kit.tail import Tail

Outcome = Literal["recovered", "failed_cleanly", "failed", "hang", "missed"]

_NAMED: dict[str, tuple[str, ...]] = {
    "collector": ("collector",),
    "rank": ("rank",),
    "controller": ("TransferQueue",),
    "storage": ("TransferQueue",),
    "score": ("score", "scor"),
    "driver": ("",),
    "engine": ("server",),
}
"""What the reason of a run that failed has to name, by the part that was broken."""
_LOOK_S = 0.1
_MORE_STEPS = 2
_END_S = 120.0


@dataclass(slots=True)
class Result:
    """What came of a fault: `seconds` from its end to the outcome, `reason` what the run said, `left` what it left."""

    fault: Fault
    outcome: Outcome
    seconds: float
    reason: str = ""
    left: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Tally:
    """The figures of a session. `unprovoked` counts ends of the run between two faults."""

    results: list[Result] = field(default_factory=list)
    unprovoked: list[str] = field(default_factory=list)
    history: History = field(default_factory=History)
    seconds: float = 0.0

    @property
    def line(self) -> dict[str, int | float]:
        """What the command prints."""
        counts = Counter(result.outcome for result in self.results)
        return {
            "faults": sum(counts.values()) - counts["missed"],
            "recovered": counts["recovered"],
            "failed_cleanly": counts["failed_cleanly"],
            "failed": counts["failed"],
            "lost": self.history.lost,
            "twice": self.history.twice,
            "hangs": counts["hang"],
            "wrong": len(self.history.faults),
            "left": sum(len(result.left) for result in self.results),
            "unprovoked": len(self.unprovoked),
            "prompts": self.history.prompts,
            "resumed": self.history.resumed,
            "seconds": round(self.seconds, 1),
        }

    @property
    def ok(self) -> bool:
        line = self.line
        return not any(line[name] for name in ("failed", "lost", "twice", "hangs", "wrong", "left", "unprovoked"))


class Session:
    """Runs in `folder`, which must be empty. `tell` is called with each result."""

    def __init__(
        self,
        folder: Path,
        launcher: Launcher,
        *,
        limits: settings.Limits,
        options: Mapping[str, str],
        engines: Engines | None = None,
        tell: Callable[[Result], None] = lambda result: None,
    ) -> None:
        settings.prepare(folder)
        self._folder = folder
        self._launcher = launcher
        self._limits = limits
        self._engines = engines
        self._options = {**settings.options(limits), **(engines.options(limits.dead_s) if engines else {}), **options}
        self._tell = tell
        self._tail = Tail(folder / settings.RUN / "events.jsonl")
        self._driver: Process | None = None
        self._known: dict[int, psutil.Process] = {}
        self._remains: list[psutil.Process] = []
        self._memory = {path.name for path in _shared_memory()}
        self.tally = Tally()

    def run(self, faults: Iterator[Fault], *, count: int | None, seconds: float | None) -> Tally:
        """Do `count` faults, or as many as `seconds` allow; then read the history."""
        began = time.monotonic()
        try:
            for fault in faults:
                done = sum(result.outcome != "missed" for result in self.tally.results)
                over = seconds is not None and time.monotonic() - began > seconds
                if over or (count is not None and done >= count):
                    break
                result = self._one(fault)
                self.tally.results.append(result)
                self._tell(result)
            self._finish()
        finally:
            self.close()
            self.tally.seconds = time.monotonic() - began
        return self.tally

    def close(self) -> None:
        """Kill what still runs."""
        if self._driver is not None:
            self._note()
            with suppress(psutil.NoSuchProcess):
                psutil.Process(self._driver.pid).kill()
        processes.kill_all([*self._known.values(), *self._remains])

    def _one(self, fault: Fault) -> Result:
        steps = self._tail.read().steps
        if fault.moment == STARTING and self._driver is not None:
            self._stop()
        if self._driver is None:
            self._start()
        if fault.moment != STARTING:
            self._await_step(steps)
            self._await_moment(fault)
        victim = self._victim(fault)
        if victim is None:
            return Result(fault, "missed", 0.0, "no process of that part")
        driver = self._driver
        assert driver is not None
        self._note()
        if fault.kind == "cut":
            assert self._engines is not None
            self._engines.cut(victim.pid)
        size = len(self._of(fault.part))
        inject(fault, victim)
        result = self._outcome(fault, victim, driver, size)
        if self._engines is not None:
            self._engines.restore()
        if result.outcome in ("failed_cleanly", "failed", "hang"):
            result.left = self._clean_up(driver, fault)
            self._driver = None
        return result

    # What starts and waits.

    def _start(self) -> None:
        words = settings.first_words(self._options)
        if (self._folder / settings.RUN / "events.jsonl").exists():
            words = settings.resume_words()
        self._driver = self._launcher.start(self._folder, words)

    def _await_step(self, steps: int) -> None:
        """Wait until the run has taken a step that it had not; one that ends meanwhile is noted and resumed."""
        while True:
            assert self._driver is not None
            until = time.monotonic() + self._limits.start_s
            while time.monotonic() < until and self._driver.poll() is None:
                if self._tail.read().steps > steps:
                    self._note_remains()
                    return
                time.sleep(_LOOK_S)
            said = f"exit {self._driver.poll()}: {self._reason(self._driver)}"
            self.tally.unprovoked.append(said)
            if len(self.tally.unprovoked) >= 3:
                raise RuntimeError(f"the run does not start: {self.tally.unprovoked}")
            self._clean_up(self._driver, None)
            self._start()

    def _await_moment(self, fault: Fault) -> None:
        """Wait for the event of a fault, and its delay; an event that does not come is not waited for long."""
        before = self._tail.read().counts[fault.moment]
        until = time.monotonic() + self._limits.dead_s
        while self._tail.read().counts[fault.moment] == before and time.monotonic() < until:
            time.sleep(_LOOK_S / 5)
        time.sleep(fault.delay_s)

    def _victim(self, fault: Fault) -> psutil.Process | None:
        until = time.monotonic() + (self._limits.start_s if fault.moment == STARTING else self._limits.dead_s)
        while time.monotonic() < until:
            assert self._driver is not None
            found = self._of(fault.part)
            if found:
                # The moment says that a part has begun to start: that takes it a little while.
                time.sleep(fault.delay_s if fault.moment == STARTING else 0.0)
                return found[fault.which % len(found)]
            if self._driver.poll() is not None:
                return None
            time.sleep(_LOOK_S)
        return None

    def _of(self, part: Part) -> list[psutil.Process]:
        if part == "engine":
            return self._engines.processes if self._engines is not None else []
        assert self._driver is not None
        return processes.of_part(part, self._driver.pid)

    def _outcome(self, fault: Fault, victim: psutil.Process, driver: Process, size: int) -> Result:
        """Wait for what comes of a fault; `size` is how many processes the part had before."""
        began, steps = time.monotonic(), self._tail.read().steps
        # Nobody replaces a server but the session, and the run goes on without it.
        whole = steps if fault.kind in ("pause", "slow") or fault.part == "engine" else None
        attempts = self._tail.counts["resumed"]
        while (seconds := time.monotonic() - began) < self._recovered_s(fault, attempts):
            if driver.poll() is not None:
                return self._ended(fault, driver, seconds, anew=self._is_anew(fault, attempts))
            now = self._tail.read().steps
            if whole is None and not processes.lives(victim) and len(self._of(fault.part)) >= size:
                whole = now
            # A part that hangs makes the run wait, and no longer than until it is replaced.
            if whole is not None and now >= whole + _MORE_STEPS:
                return Result(fault, "recovered", seconds)
            self._note()
            time.sleep(_LOOK_S)
        return Result(fault, "hang", seconds, f"{now - steps} steps since; the last event is {self._tail.last}")

    def _recovered_s(self, fault: Fault, attempts: int) -> float:
        """Return how long a run may take to recover."""
        return self._limits.recovered_s + (self._limits.start_s if self._is_anew(fault, attempts) else 0.0)

    def _is_anew(self, fault: Fault, attempts: int) -> bool:
        """Whether all of the run starts, or starts again since the command goes on by itself."""
        return fault.moment == STARTING or self._tail.counts["resumed"] > attempts

    def _ended(self, fault: Fault, driver: Process, seconds: float, *, anew: bool) -> Result:
        code, reason = driver.poll(), self._reason(driver)
        limit = self._limits.dead_s + self._limits.clean_s + (self._limits.start_s if anew else 0.0)
        if fault.part == "driver" and fault.kind == "kill":
            return Result(fault, "failed_cleanly", seconds, "killed")
        named = any(words in reason for words in _NAMED[fault.part])
        if code == 1 and named and seconds <= limit:
            return Result(fault, "failed_cleanly", seconds, reason)
        return Result(fault, "failed", seconds, f"exit {code} after {seconds:.1f} s (limit {limit:g}): {reason}")

    def _reason(self, driver: Process) -> str:
        """Return how the run says that it ended: in its log, or else by its last words."""
        last = self._tail.read().last
        if last.get("type") == "run_ended":
            return str(last["reason"])
        return " | ".join(driver.said().strip().splitlines()[-3:])

    # What is left.

    def _note(self) -> None:
        if self._driver is not None:
            self._known |= {process.pid: process for process in processes.tree(self._driver.pid)}

    def _clean_up(self, driver: Process, fault: Fault | None) -> list[str]:
        """Wait until all processes of a run that ended are gone; kill and name those that stay.

        What a killed driver has left goes with the next start (`_note_remains`).
        """
        if driver.poll() is None:
            self._note()
            with suppress(psutil.NoSuchProcess):
                psutil.Process(driver.pid).kill()
        known = list(self._known.values())
        self._known.clear()
        if fault is not None and (fault.part, fault.kind) == ("driver", "kill"):
            self._remains = known
            return []
        return _left(known, self._limits.clean_s) + self._stores()

    def _note_remains(self) -> None:
        """Once a run has started again, nothing is there of the one whose driver was killed."""
        remains, self._remains = self._remains, []
        if remains:
            self.tally.results[-1].left += _left(remains, 0.0)

    def _stores(self) -> list[str]:
        return [f"shared memory {path}" for path in _shared_memory() if path.name not in self._memory]

    # The end.

    def _finish(self) -> None:
        """Stop by SIGTERM, run the data to the end of its epoch, and read the history."""
        steps = self._tail.read().steps
        if self._driver is None:
            self._start()
        self._await_step(steps)
        self._stop()
        epochs = self._tail.read().counts["dispatched"] // settings.PROMPTS + 1
        self._driver = self._launcher.start(
            self._folder, settings.resume_words(f"--set=task.epochs={epochs}", "--set=trainer.min_step_s=0")
        )
        self._expect(0)
        self.tally.history = History.read(
            self._folder / settings.RUN,
            prompts=settings.PROMPTS,
            epochs=epochs,
            max_staleness=settings.MAX_STALENESS,
        )
        difference = replay(Recording.read(self._folder / settings.RUN)).difference
        if difference is not None:
            self.tally.history.faults.append(f"the log does not replay: {difference}")

    def _stop(self) -> None:
        assert self._driver is not None
        self._note()
        os.kill(self._driver.pid, signal.SIGTERM)
        self._expect(143)

    def _expect(self, code: int) -> None:
        """Wait for an exit code; another one is an end that no fault provoked."""
        assert self._driver is not None
        until = time.monotonic() + _END_S
        while self._driver.poll() is None and time.monotonic() < until:
            self._note()
            time.sleep(_LOOK_S)
        if self._driver.poll() != code:
            self.tally.unprovoked.append(
                f"exit {self._driver.poll()}, not {code}: {self._reason(self._driver)}; {self._driver.said()[-2000:]}"
            )
        left = self._clean_up(self._driver, None)
        self._driver = None
        if self.tally.results:
            self.tally.results[-1].left += left


def _left(known: Sequence[psutil.Process], timeout_s: float) -> list[str]:
    """Give processes so long to end; kill and name those that did not."""
    _, alive = psutil.wait_procs(list(known), timeout=timeout_s)
    left = []
    for process in alive:
        if processes.lives(process):
            with suppress(psutil.Error):
                left.append(f"process {process.pid}: {' '.join(process.cmdline()).strip()[:80]}")
    processes.kill_all(alive)
    return left


def _shared_memory() -> list[Path]:
    return list(Path("/dev/shm").glob("asyncrl-*"))
