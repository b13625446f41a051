"""What a vLLM engine is built from. Importing this needs no vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class VLLMSettings:
    """`model_path` is a checkpoint folder; `max_length` counts prompt and response tokens of one sequence.

    `rows` sequences decode at once, in a cache of `cache_bytes`. On a CPU `threads` cores compute, 0 means all.
    Weights on their way to vLLM's workers lie in `weights_folder`. `options` are further arguments of vLLM's
    `AsyncEngineArgs`, which win over those above.
    """

    model_path: str
    dtype: str = "bfloat16"
    max_length: int = 2048
    rows: int = 64
    cache_bytes: int = 1 << 30
    threads: int = 0
    weights_folder: str = "/dev/shm"
    options: Mapping[str, Any] = field(default_factory=dict)
