"""How an outcome travels from the process that scores: MessagePack and safetensors, never pickle.

That process may run what a model generated, so nothing that it sends may run code here.
"""

from collections.abc import Sequence

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


_DECODER = msgspec.msgpack.Decoder(list[_Answer])


def encode(outcomes: Sequence[Outcome]) -> bytes:
    """Return outcomes as bytes; NaN and infinities stay as they are."""
    return msgspec.msgpack.encode([_answer(outcome) for outcome in outcomes])


def decode(answer: bytes, count: int) -> list[Outcome]:
    """Return the `count` outcomes of `encode`; ValueError if the bytes are something else."""
    try:
        found = _DECODER.decode(answer)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the process that scores answered what is not an outcome: {error}") from error
    if len(found) != count:
        raise ValueError(f"the process that scores answered {len(found)} outcomes and was asked for {count}")
    return [_outcome(one) for one in found]


def _answer(outcome: Outcome) -> _Answer:
    if isinstance(outcome, SampleFailure):
        # A text of the user's may hold half of a surrogate pair, which no UTF-8 has.
        error = outcome.error.encode("utf-8", "backslashreplace").decode()
        return _Answer(cause=outcome.cause, error=error)
    extras = b""
    if outcome.extras:
        from safetensors.torch import save

        # A clone: two extras may share one memory, which safetensors refuses.
        extras = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in outcome.extras.items()})
    return _Answer(outcome.value, dict(outcome.parts), extras)


def _outcome(answer: _Answer) -> Outcome:
    if answer.cause:
        return SampleFailure(answer.cause, answer.error)
    if not answer.extras:
        return Reward(answer.value, answer.parts)
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return Reward(answer.value, answer.parts, load(answer.extras))
    except SafetensorError as error:
        raise ValueError(f"the process that scores answered extras that cannot be read: {error}") from error
