"""The collectors and their engines."""

from typing import Annotated, Literal

from pydantic import Field

from asyncrl.configs.sections.fields import Count, Few, Seconds, Section


class Collector(Section):
    count: Few
    """Collector actors, each with its own generator."""
    engine: Literal["auto", "native", "batch", "vllm", "http"]
    """`native`: continuous batching; weights change while it decodes. `batch`: whole batches with transformers' own
    caches; weights change between two batches. `auto`: `native`, or `batch` for a model that `native` cannot run.
    `vllm`: vLLM in the collector's process. `http`: `servers` that run already (docs/engines.md)."""
    servers: list[str]
    """With `http`: the base URLs of the servers, such as http://127.0.0.1:8000. Collectors take them in turn, each has
    at least one, and a server serves one run at a time."""
    server_kind: Literal["vllm", "sglang"]
    """With `http`: what the servers are."""
    server_timeout_s: Seconds
    """With `http`: a collector that has been without any server for this long ends the run. Less than
    `group_timeout_s`."""
    weights_folder: str | None
    """With `vllm` and `http`: the folder through which weights reach the engine. Every server sees it under the same
    path. null: /dev/shm, for an engine on this host."""
    decode_samples: Count
    """Largest number of samples that decode together; with `http`, on each server."""
    cache_gib: Annotated[float, Field(gt=0, le=1e6)]
    """Memory of the native engine's keys and values; fewer samples decode together where it holds no more."""
    slot_tokens: Annotated[int, Field(ge=2, le=10_000_000)] | None
    """Longest prompt and response together, in tokens, for which the native engine keeps room; null: the longest prompt
    of the task and `rollout.max_new_tokens`."""
    compile: bool
    """Fuse the native engine's kernels with torch.compile on a GPU: tokens come about twice as fast, and the first one
    about a minute later. Has no effect on a CPU."""
    on_update: Literal["keep", "recompute", "continue", "restart"]
    """Responses in flight when new weights come: they go on with their cache (`keep`) or with one made anew
    (`recompute`), or are aborted and go on from their last token (`continue`) or from their prompt (`restart`)."""
    queue_timeout_s: Seconds | None
    """A group that waits longer for its turn to decode fails (reason `queue_timeout`); null: run-ahead times
    `group_timeout_s`, the longest wait in a queue that moves."""
    group_timeout_s: Seconds
    """A group that takes longer than this from the moment it begins to decode fails (reason `timeout`)."""
    score_timeout_s: Seconds
    """A sample whose score takes longer fails (cause `score_timeout`); the others of its group go on."""
    score_processes: Annotated[int, Field(ge=0, le=1024)]
    """Processes per collector that score on Ray: the task's `score`, or reward functions; one that hangs is killed.
    0: scores run in threads of the collector's process, and one that never returns can stop the collector. Async ones
    always run in the collector's event loop. With `runtime: local` everything runs in one process."""
    put_timeout_s: Seconds
    """How long a refused put is retried before the run ends."""
    on_error: Literal["skip", "abort"]
    """What a failed group does. `skip`: it is counted and the run goes on; `abort`: it ends the run."""
    max_failures_in_a_row: Count
    """With `skip`, end the run after this many failed groups of one collector without a good one in between."""
    threads: Few
    """Torch threads per collector."""
    device: Literal["auto", "cpu", "cuda"]
    """Where collectors generate. `auto`: on GPUs if torch sees any, which they take in turn after the ranks."""
