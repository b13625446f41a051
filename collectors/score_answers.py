"""How an outcome travels from the process that scores: MessagePack and safetensors, never pickle.

That process may run what a model generated, so nothing that it sends may run code here.
"""

import msgspec

from asyncrl.collectors.outcome import Outcome, SampleFailure
from asyncrl.collectors.tasks.base import Reward


class _Answer(msgspec.Struct, omit_defaults=True):
    """A reward, its extras as the bytes of a safetensors file; or, with a `cause`, a failure."""

    value: float = 0.0
    parts: dict[str, float] = {}
    extras: bytes = b""
    cause: str = ""
    error: str = ""


_DECODER = msgspec.msgpack.Decoder(_Answer)


def encode(outcome: Outcome) -> bytes:
    """Return an outcome as bytes; NaN and infinities stay as they are."""
    if isinstance(outcome, SampleFailure):
        # A text of the user's may hold half of a surrogate pair, which no UTF-8 has.
        error = outcome.error.encode("utf-8", "backslashreplace").decode()
        return msgspec.msgpack.encode(_Answer(cause=outcome.cause, error=error))
    extras = b""
    if outcome.extras:
        from safetensors.torch import save

        # A clone: two extras may share one memory, which safetensors refuses.
        extras = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in outcome.extras.items()})
    return msgspec.msgpack.encode(_Answer(outcome.value, dict(outcome.parts), extras))


def decode(answer: bytes) -> Outcome:
    """Return the outcome of `encode`; ValueError if the bytes are something else."""
    try:
        found = _DECODER.decode(answer)
        if found.cause:
            return SampleFailure(found.cause, found.error)
        if not found.extras:
            return Reward(found.value, found.parts)
        from safetensors import SafetensorError
        from safetensors.torch import load
    except msgspec.MsgspecError as error:
        raise ValueError(f"the process that scores answered what is not an outcome: {error}") from error
    try:
        return Reward(found.value, found.parts, load(found.extras))
    except SafetensorError as error:
        raise ValueError(f"the process that scores answered extras that cannot be read: {error}") from error
