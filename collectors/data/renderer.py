"""From a checked prompt to the text that the model goes on from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.collectors.data.columns import Messages
from asyncrl.configs.sections.task import Data
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.model.tokenizer import CharTokenizer, ChatTokenizer


@dataclass(frozen=True, slots=True)
class Shot:
    """One example in front of every prompt."""

    prompt: str
    answer: str


class Renderer:
    """Puts system prompt and examples before a prompt, as chat messages or as plain text; `tools` are JSON schemas.

    With `raw` a prompt stays a text: an agent is given it, and writes its own messages.
    """

    def __init__(
        self,
        data: Data,
        shots: Sequence[Shot],
        tokenizer: ChatTokenizer,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        raw: bool = False,
    ) -> None:
        self._format = data.prompt_format
        self._tokenizer = tokenizer
        self._tools = tools
        self.chat = tokenizer.has_chat_template and data.chat_template != "off" and not raw
        """Whether prompts go through the chat template."""
        self.plain_unasked = data.chat_template == "auto" and not tokenizer.has_chat_template
        """Whether prompts go in as plain text for want of a template, and nobody said that they should."""
        without = "data.chat_template is off" if data.chat_template == "off" else "the tokenizer has no chat template"
        if isinstance(tokenizer, CharTokenizer):
            without = "the built-in small model has none; name a checkpoint that has one (--model, model.path)"
        self.refusal = f"chat messages need a chat template, and {without}"
        if raw:
            self.refusal = "an agent writes its own messages: its prompt must be a text"
        if data.chat_template == "on" and not tokenizer.has_chat_template:
            raise ConfigError(f"data.chat_template is on, and {without}")
        if tools and not self.chat:
            raise ConfigError(f"an environment's tools need a chat template, and {without}")
        if data.system_prompt is not None and not self.chat:
            raise ConfigError(
                f"data.system_prompt needs a chat template, and {without}; write it into data.prompt_format"
            )
        self._system = [] if data.system_prompt is None else [_message("system", data.system_prompt)]
        self._turns = [turn for shot in shots for turn in self._turns_of(shot)]
        self._shown = "".join(f"{self._formatted(shot.prompt)}{shot.answer}\n\n" for shot in shots)

    def text(self, prompt: str | Messages) -> str:
        """Return the text of a prompt; ValueError if the template refuses it, or messages have none (`refusal`)."""
        if self.chat:
            return self._tokenizer.chat(self._messages(prompt), tools=self._tools)
        if isinstance(prompt, str):
            return self._shown + self._formatted(prompt)
        raise ValueError(self.refusal)

    def tokens(self, text: str) -> int:
        """Count the tokens of a text; ValueError if it has one that the tokenizer does not know."""
        return len(self._tokenizer.encode(text))

    def check_first_token(self, text: str) -> None:
        """ConfigError if a text of the template would get a first token that the template did not write."""
        if self.chat and len(self._tokenizer.encode(text)) != len(self._tokenizer.encode_more(text)):
            raise ConfigError(
                "the chat template does not write the tokenizer's BOS token, and prompts begin with one; set "
                "rollout.add_bos to false to leave it out, as the template does, or data.chat_template to off"
            )

    def _messages(self, prompt: str | Messages) -> list[Mapping[str, Any]]:
        turns = [_message("user", self._formatted(prompt))] if isinstance(prompt, str) else list(prompt)
        own = turns[:1] if turns[0]["role"] == "system" else []
        return [*(own or self._system), *self._turns, *turns[len(own) :]]

    def _turns_of(self, shot: Shot) -> Sequence[Mapping[str, Any]]:
        return _message("user", self._formatted(shot.prompt)), _message("assistant", shot.answer)

    def _formatted(self, prompt: str) -> str:
        # Not str.format: braces are common in what asks for \\boxed{}.
        return self._format.replace("{prompt}", prompt)


def _message(role: str, content: str) -> Mapping[str, Any]:
    return {"role": role, "content": content}
