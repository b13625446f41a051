"""CUDA graphs of the decode step, one per number of rows and window, captured when first needed.

A replay launches a step's hundreds of kernels at once: from Python they take longer to launch than to run.
"""

from collections.abc import Callable
from typing import Any

import structlog
import torch

from asyncrl.collectors.engines.rows import Rows

Step = Callable[[int, int, bool], None]
_WARM_UPS = 3

log = structlog.get_logger()


class StepGraphs:
    """Runs `step(rows, window, filtered)` as a captured graph; `rows` are what a step changes beside the cache.

    A step that cannot be captured, as its model waits for the device (some mixtures of experts do), runs as it is.
    """

    def __init__(self, step: Step, rows: Rows) -> None:
        self._step = step
        self._rows = rows
        self._graphs: dict[tuple[int, int, bool], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._capturable = True

    def __call__(self, rows: int, window: int, filtered: bool) -> None:
        """Run one step on the current stream, without waiting for it."""
        key = (rows, window, filtered)
        if key not in self._graphs and self._capturable:
            self._warm_up(*key)
            try:
                self._graphs[key] = self._capture(*key)
            except RuntimeError as error:
                log.warning("decoding runs without CUDA graphs: its step cannot be captured", error=str(error))
                self._capturable = False
        if key in self._graphs:
            self._graphs[key].replay()
        else:
            self._step(rows, window, filtered)

    def forget(self) -> None:
        """Capture anew when next needed: weights or cache are to lie elsewhere."""
        self._graphs.clear()
        self._pool = None

    def _warm_up(self, rows: int, window: int, filtered: bool) -> None:
        # Warm-up steps are real ones: what they made of the rows must not stay. The cache's positions that they
        # write are written again, to the same values, by the step itself.
        saved = self._rows.save()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._step(rows, window, filtered)
        torch.cuda.current_stream().wait_stream(stream)
        self._rows.restore(saved)
        torch.cuda.synchronize()

    def _capture(self, rows: int, window: int, filtered: bool) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # By default it is a stream of the GPU that was first captured on in this process: on another GPU nothing would
        # be captured.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # Weights may be staged meanwhile, by another thread and on another stream: that is none of the capture's.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            self._step(rows, window, filtered)
        self._pool = self._pool or graph.pool()
        return graph
