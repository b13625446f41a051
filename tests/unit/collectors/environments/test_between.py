"""What stands between turns, and templates that cannot write it."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from asyncrl.collectors.environments.between import Between, tool_message
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.model.tokenizer import CharTokenizer


def test_plain_text_is_tokenised_alone_and_messages_need_a_template() -> None:
    between = Between(CharTokenizer(), [1], chat=False)
    assert between.ids("h>", 1) == [19, 31]
    with pytest.raises(ValueError, match="a reply of messages needs a chat template"):
        between.ids([{"role": "user", "content": "h>"}], 1)


def test_the_end_of_a_turn_is_written_where_the_model_did_not(chat_ml: Any) -> None:
    between = Between(chat_ml, [2], chat=True)
    assert between.text("h") == "<|im_end|>\n<|im_start|>user\nh<|im_end|>\n<|im_start|>assistant\n"
    assert between.ids("h", 50) == [2, *between.ids("h", 2)]


@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_template_that_leaves_out_replies_is_refused(chat_ml: Any, role: str) -> None:
    class Deaf(type(chat_ml)):  # type: ignore[misc]
        def chat(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] = ()) -> str:
            kept = [m for i, m in enumerate(messages) if not i or m["role"] != role]
            return str(super().chat(kept, tools=tools))

    schema = {"type": "function", "function": {"name": "try"}}
    with pytest.raises(ConfigError, match=f"leaves out messages of the role '{role}'"):
        Between(Deaf(), [2], chat=True, tools=[schema]).check()
    Between(chat_ml, [2], chat=True, tools=[schema]).check()
    assert "<tool_response>42</tool_response>" in Between(chat_ml, [2], chat=True).text([tool_message("try", "42")])


def test_a_template_that_repeats_or_changes_answers_is_refused(chat_ml: Any) -> None:
    class Twice(type(chat_ml)):  # type: ignore[misc]
        def chat(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] = ()) -> str:
            return str(super().chat([*messages, messages[1]], tools=tools))

    with pytest.raises(ConfigError, match="does not write an answer once and as it is"):
        Between(Twice(), [2], chat=True).check()
