"""What the native engine is given to work with."""

from dataclasses import dataclass

from asyncrl.engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NativeSettings:
    """Limits and switches of a native engine.

    `rows` sequences decode together at most, each of `length` tokens (prompt and response), as far as their keys and
    values fit into `cache_bytes`. Rows are looked at every `burst` tokens. One pass over prompts holds `fill_tokens`
    tokens, padding included, or one prompt. `graphs` and `compiled` are for a GPU: CUDA graphs of the decode step, and
    the model's kernels fused by torch.compile first, which takes a minute before the first token. A control call waits
    `control_timeout_s` at most. With `experts` results say which experts each token's routers chose. `ahead` bursts run
    before the last one is taken, 0 or 1 (None: 1 on a GPU).
    """

    rows: int
    length: int
    cache_bytes: int
    burst: int = 8
    fill_tokens: int = 4096
    graphs: bool = True
    compiled: bool = False
    control_timeout_s: float = 600.0
    experts: bool = False
    ahead: int | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "cache_bytes", "burst", "fill_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; a native engine needs at least 1")
        if self.length < 2:
            raise ConfigError(f"length is {self.length}; one prompt token and one response token make 2")
