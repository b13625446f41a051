"""Text to token ids and back: a character tokenizer, or a Hugging Face one beside a checkpoint."""

from typing import Any, Protocol

from asyncrl.engine.errors import ConfigError

_ALPHABET = "0123456789abcdefghijklmnopqrs>"


class Tokenizer(Protocol):
    """What generation and scoring need of a tokenizer."""

    pad_id: int
    eos_id: int
    vocab_size: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class CharTokenizer:
    """32 tokens: padding, end, and 30 characters, one token each."""

    pad_id = 0
    eos_id = 1
    vocab_size = 2 + len(_ALPHABET)

    def encode(self, text: str) -> list[int]:
        """Return one id a character; ConfigError names a character that has none."""
        unknown = sorted(set(text) - set(_ALPHABET))
        if unknown:
            raise ConfigError(f"characters {unknown} are not in the character tokenizer ({_ALPHABET})")
        return [2 + _ALPHABET.index(character) for character in text]

    def decode(self, ids: list[int]) -> str:
        """Return the characters; the end is left out, and padding, which no answer holds, shows as `_`."""
        return "".join("_" if i == self.pad_id else _ALPHABET[i - 2] for i in ids if i != self.eos_id)


class HuggingFaceTokenizer:
    """A tokenizer of the transformers library, without special tokens added."""

    def __init__(self, path: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        self.eos_id = int(self._tokenizer.eos_token_id)
        pad = self._tokenizer.pad_token_id
        self.pad_id = self.eos_id if pad is None else int(pad)
        self.vocab_size = len(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def load_tokenizer(path: str | None) -> Tokenizer:
    """Return the tokenizer of a checkpoint folder, or the character tokenizer for none."""
    return CharTokenizer() if path is None else HuggingFaceTokenizer(path)
