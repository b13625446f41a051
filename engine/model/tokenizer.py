"""Text to token ids and back: a character tokenizer, or a Hugging Face one beside a checkpoint."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from asyncrl.engine.errors import ConfigError
from asyncrl.engine.model.folder import Note
from asyncrl.engine.model.settings import check_small_files, end_tokens, why_not_loaded

_ALPHABET = "0123456789abcdefghijklmnopqrs>"


class Tokenizer(Protocol):
    """What generation and scoring need of a tokenizer."""

    pad_id: int
    eos_id: int
    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text that begins a sequence: a prompt."""

    def encode_more(self, text: str) -> list[int]:
        """Return the ids of a text that goes on from another: an answer."""

    def decode(self, ids: list[int]) -> str:
        """Return the text that a score reads: special tokens of a checkpoint's tokenizer are left out."""

    def whole_text(self, ids: Sequence[int]) -> str:
        """Return the text of all tokens, in which stop strings are looked for."""


class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer that may have a chat template."""

    has_chat_template: bool

    def chat(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return messages as the text in front of the assistant's next one. ValueError if the template refuses them.

        `tools` are the JSON schemas of functions that the assistant may call.
        """


class CharTokenizer:
    """32 tokens: padding, end, and 30 characters, one token each."""

    pad_id = 0
    eos_id = 1
    pad_text, eos_text = "<pad>", "<eos>"
    vocab_size = 2 + len(_ALPHABET)
    has_chat_template = False

    def chat(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        raise ValueError("the character tokenizer has no chat template")

    @classmethod
    def vocabulary(cls) -> dict[str, int]:
        """Return the id of each token's text."""
        return {text: i for i, text in enumerate((cls.pad_text, cls.eos_text, *_ALPHABET))}

    def encode(self, text: str) -> list[int]:
        """Return one id a character; ConfigError names a character that has none."""
        unknown = sorted(set(text) - set(_ALPHABET))
        if unknown:
            raise ConfigError(
                f"characters {unknown} are not among those of the built-in small model ({_ALPHABET}); with other texts "
                "name a checkpoint (--model, model.path)"
            )
        return [2 + _ALPHABET.index(character) for character in text]

    def encode_more(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, ids: list[int]) -> str:
        """Return the characters; the end is left out, and padding, which no answer holds, shows as `_`."""
        return "".join("_" if i == self.pad_id else _ALPHABET[i - 2] for i in ids if i != self.eos_id)

    def whole_text(self, ids: Sequence[int]) -> str:
        return self.decode(list(ids))


class HuggingFaceTokenizer:
    """A tokenizer of the transformers library.

    A prompt begins with the special tokens that the tokenizer puts before a text (Llama's BOS), with those
    alone if `add_bos`, without any if it is False. Nothing is put behind it: a response goes on from there.
    """

    def __init__(self, path: str, *, add_bos: bool | None = None) -> None:
        from transformers import AutoTokenizer

        check_small_files(path)
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError, RecursionError) as error:
            raise ConfigError(
                f"model.path is {path!r}, whose tokenizer transformers cannot load: {why_not_loaded(error)}"
            ) from error
        ends = [self._tokenizer.eos_token_id, *end_tokens(path)]
        eos = next((int(end) for end in ends if end is not None), None)
        if eos is None:
            raise ConfigError(
                f"model.path is {path!r}, whose tokenizer has no end token; set eos_token in tokenizer_config.json"
            )
        self.eos_id = eos
        pad = self._tokenizer.pad_token_id
        self.pad_id = self.eos_id if pad is None else int(pad)
        self.vocab_size = len(self._tokenizer)
        self._first = self._first_tokens(path, add_bos)
        self.has_chat_template = bool(self._tokenizer.chat_template)

    def chat(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise ValueError(f"the chat template refuses it: {error}") from error
        return str(text)

    def encode(self, text: str) -> list[int]:
        ids = self.encode_more(text)
        # A prompt that spells its first token out, as chat templates do, does not get a second one.
        return ids if ids[: len(self._first)] == self._first else [*self._first, *ids]

    def encode_more(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def whole_text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _first_tokens(self, path: str, add_bos: bool | None) -> list[int]:
        if add_bos is False:
            return []
        if add_bos:
            if self._tokenizer.bos_token_id is None:
                raise ConfigError(f"rollout.add_bos is true, and the tokenizer of {path!r} has no bos_token")
            return [int(self._tokenizer.bos_token_id)]
        text = "0"
        plain, whole = self.encode_more(text), list(self._tokenizer.encode(text, add_special_tokens=True))
        starts = (at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
        return whole[: next(starts, 0)] if plain else []


def load_tokenizer(path: str | None, *, add_bos: bool | None = None) -> ChatTokenizer:
    """Return the tokenizer of a checkpoint folder, or the character tokenizer for none and for what a run of it saved.

    ConfigError for one that cannot be loaded, or lacks an end token.
    """
    if path is None or is_built_in(path):
        return CharTokenizer()
    return HuggingFaceTokenizer(path, add_bos=add_bos)


def is_built_in(path: str) -> bool:
    """Whether a run of the built-in model saved this folder, whose tokens are then characters."""
    note = Note.read(Path(path))
    return note is not None and note.characters
