"""The event log of a run while it grows."""

import json
from collections import Counter
from pathlib import Path
from typing import Any


class Tail:
    """Counts events by type as they reach the file. Call `read` before looking."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._at = 0
        self.counts: Counter[str] = Counter()
        self.last: dict[str, Any] = {}

    def read(self) -> "Tail":
        """Take in what was written since the last call."""
        try:
            size = self._file.stat().st_size
        except FileNotFoundError:
            return self
        # A finished segment was renamed, or a resumed run has cut off a torn line.
        self._at = self._at if size >= self._at else 0 if size < self._at // 2 else size
        with self._file.open("rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._at += len(line)
                event = json.loads(line)
                self.counts[event["type"]] += 1
                self.last = event
        return self

    @property
    def steps(self) -> int:
        return self.counts["step_ended"]
