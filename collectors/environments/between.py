"""The tokens between two turns: the reply of the environment, and what the chat template writes around it.

Only these are rendered and tokenised, never what the model generated. With a chat template the text is what a chat of a
user's message, an answer and the reply has behind the answer, up to where the next answer begins:

    <|im_end|>\\n<|im_start|>user\\nhigher<|im_end|>\\n<|im_start|>assistant\\n

Its first token is left out if the model has generated it to end its turn. A template that changes earlier turns (by
leaving out their reasoning, for example) does not change them here: the model goes on from what it has seen. Without a
template the reply alone is tokenised.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.collectors.environments.base import Message
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.model.tokenizer import ChatTokenizer

_ANSWER = "ANSWER0ANSWER"
"""Stands for the model's turn in a rendering."""
_QUESTION: Message = {"role": "user", "content": "QUESTION"}


class Between:
    """`stop_ids` are the tokens that end a turn; with `chat` replies go through the chat template."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        stop_ids: Sequence[int],
        *,
        chat: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(stop_ids)
        self._chat = chat
        self._tools = tools

    def ids(self, reply: str | Sequence[Message], last: int | None) -> list[int]:
        """Return the tokens of a reply behind a turn that ended with the token `last`.

        ValueError if the template refuses it, or a text without template is not a text.
        """
        if not self._chat:
            if not isinstance(reply, str):
                raise ValueError("a reply of messages needs a chat template; without one it must be a text")
            return self._tokenizer.encode_more(reply)
        ids = self._tokenizer.encode_more(self.text(reply))
        ended = last in self._stop_ids and bool(ids) and ids[0] in self._stop_ids
        return ids[1:] if ended else ids

    def text(self, reply: str | Sequence[Message]) -> str:
        """Return what the template writes behind the model's turn; ValueError if it refuses."""
        more: Sequence[Message] = [{"role": "user", "content": reply}] if isinstance(reply, str) else list(reply)
        chat = [_QUESTION, {"role": "assistant", "content": _ANSWER}, *more]
        rendered = self._tokenizer.chat(chat, tools=self._tools)
        _, found, behind = rendered.partition(_ANSWER)
        if not found or _ANSWER in behind:
            raise ValueError("the chat template does not write an answer once and as it is")
        return behind

    def check(self) -> None:
        """ConfigError if the template cannot write a reply behind an answer."""
        replies: dict[str, Sequence[Message]] = {"user": [{"role": "user", "content": "REPLY"}]}
        if self._tools:
            replies["tool"] = [tool_message("TOOL", "REPLY")]
        for role, reply in replies.items() if self._chat else ():
            try:
                text = self.text(reply)
            except ValueError as error:
                raise ConfigError(f"environment: the chat template cannot go on from an answer: {error}") from error
            if "REPLY" not in text:
                raise ConfigError(f"environment: the chat template leaves out messages of the role {role!r}")


def tool_message(name: str, content: str) -> Message:
    return {"role": "tool", "name": name, "content": content}
