"""Secrets of the environment and of URLs: what a run writes about itself shows none of them.

Invariant: the value of a variable that is named like a secret stands in no line of a run's logs, events and summary.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.configs import Loaded, flatten
from asyncrl.engine.errors import ConfigError

_SECRET = re.compile(r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|(?:API|ACCESS|SECRET|PRIVATE)_?KEY)$", re.IGNORECASE)
_SHORTEST = 8
"""Characters. A shorter value is a word that occurs by itself; to hide it would spoil texts."""
_LOGIN = re.compile(r"(://)[^\s/@:\"']*:[^\s/@\"']*@")


class Redaction:
    """Replaces secrets in texts: `HF_TOKEN`'s value by `[HF_TOKEN]`, and `://user:password@` by `://[login]@`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._secrets: list[tuple[str, str]] = []
        for name, value in environment.items():
            if _SECRET.search(name) and len(value) >= _SHORTEST:
                # Errors are written as Python and as JSON have them: some characters are then others.
                plain = {value, repr(value)[1:-1]}
                self._secrets += [(text, name) for text in plain | {json.dumps(text)[1:-1] for text in plain}]
        self._secrets.sort(key=lambda secret: -len(secret[0]))  # One may begin with another.

    def __call__(self, text: str) -> str:
        for secret, name in self._secrets:
            if secret in text:
                text = text.replace(secret, f"[{name}]")
        return _LOGIN.sub(r"\1[login]@", text) if "://" in text else text

    def check(self, loaded: Loaded) -> None:
        """ConfigError, without the secret, if the configuration holds one: it is written down with the run."""
        for path, value in flatten(loaded.config).items():
            for text in _texts(value):
                shown = self(text)
                if shown != text:
                    raise ConfigError(
                        f"{path} (from {self(loaded.sources.get(path, 'the configuration'))}) has {shown!r}: the "
                        "configuration is written into the run's folder, and a secret must not be. Leave it out, and "
                        "let the code that needs it read the variable"
                    )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from (*_texts(key), *_texts(inner))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
