"""What the HTTP engine is built from."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["vllm", "sglang"]


@dataclass(frozen=True, slots=True)
class HTTPSettings:
    """`urls` are replicas of one `kind` that serve the checkpoint folder `model_path`.

    Each takes `rows` requests at once, of sequences of at most `max_length` tokens. Weights are written as `dtype` to
    `weights_folder`, which every server must see under the same path: shared memory on one host, a shared folder else.
    A replica that misses a probe of `answer_s` seconds is left out, and taken back when it is healthy. The engine ends
    once it has been without any for `outage_s` seconds.
    """

    urls: tuple[str, ...]
    kind: Kind
    model_path: str
    dtype: str = "bfloat16"
    max_length: int = 2048
    rows: int = 64
    weights_folder: str = "/dev/shm"
    answer_s: float = 15.0
    outage_s: float = 300.0
