"""Damages to what is read, for tests: bytes that changed, and values that can still be read and are others."""

import json
from collections.abc import Iterator
from random import Random
from typing import Any

from hypothesis import note
from hypothesis import strategies as st

ODD = (
    b"null",
    b"-1",
    b"[]",
    b"{}",
    b'""',
    b"1e999",
    b"NaN",
    b"9" * 25,
    b"1.5",
    b"true",
    b"\xff\xfe",
    b"\x00",
    b"[" * 2000,
)
VALUES: tuple[Any, ...] = (0, -1, 7, 2**40, 10**25, 1.5, "", "x", None, True, [], {}, [1], {"a": 1})


RANDOMS = st.randoms(use_true_random=True)
"""Hypothesis draws the seed alone: a hundred thousand inputs, each drawn byte by byte, would take ten minutes more."""
AT_ONCE = 20
"""Inputs per example of hypothesis."""


def inputs(random: Random, whole: bytes, *, lines: bool) -> Iterator[bytes]:
    """Yield AT_ONCE damaged forms of a right input; of `lines` of JSON every other one can still be read."""
    for number in range(AT_ONCE):
        one = misleading(random, whole) if lines and number % 2 else damaged(random, whole)
        note(f"input {number}: {one!r}")
        yield one


def damaged(random: Random, whole: bytes) -> bytes:
    """Change bytes: flip a bit, cut, leave out, insert odd values, take parts twice."""
    data = bytearray(whole)
    for _ in range(random.randint(1, 3)):
        at = random.randint(0, len(data))
        end = min(len(data), at + random.randint(1, 30))
        match random.randint(0, 4):
            case 0 if data:
                data[min(at, len(data) - 1)] ^= 1 << random.randint(0, 7)
            case 1:
                del data[at:]
            case 2:
                del data[at:end]
            case 3:
                data[at:end] = random.choice(ODD)
            case _:
                data[at:at] = data[at:end]
    return bytes(data)


def misleading(random: Random, whole: bytes) -> bytes:
    """Change values in lines of JSON, so that they can still be read."""
    lines = whole.splitlines()
    for _ in range(random.randint(1, 2)):
        at = random.randrange(len(lines))
        content = json.loads(lines[at])
        places = list(_places(content))
        if not places:
            continue
        place, key = random.choice(places)
        if random.random() < 0.5:
            place[key] = random.choice(VALUES)
        else:
            del place[key]
        lines[at] = json.dumps(content).encode()
    return b"\n".join(lines) + b"\n"


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what a JSON document consists of: a map or list, and a key or index in it."""
    keys = content.keys() if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
    for key in keys:
        yield content, key
        yield from _places(content[key])
