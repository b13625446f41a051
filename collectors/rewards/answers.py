"""What a record says is right, and what of a response is compared with it."""

import re

from asyncrl.engine.records import Prompt


def expected(prompt: Prompt, field: str) -> str:
    """Return a field of the prompt's record as text, `answer` being the prompt's own; ValueError if there is none."""
    there = ", ".join(map(str, prompt.fields)) or "none"
    if field == "answer":
        # A column of that name is the answer only if data.answer_column says so: it may be null, or name another.
        if not prompt.answer and prompt.fields.get(field) != "":
            raise ValueError(
                f"prompt {prompt.id!r} has no answer; name its field in data.answer_column, or as the reward's "
                f"`field`; its fields are {there}"
            )
        return prompt.answer
    value = prompt.fields.get(field)
    if value is None:
        raise ValueError(f"prompt {prompt.id!r} has no field {field!r}; it has {there}")
    return str(value)


def pattern_of(text: str, parameter: str) -> re.Pattern[str]:
    """Compile a regular expression; ValueError, with the parameter's name, if it is not one."""
    try:
        return re.compile(text, re.DOTALL)
    except re.error as error:
        raise ValueError(f"{parameter} {text!r} is not a regular expression: {error}") from error


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the first group (or the whole) of the last match; None without a match."""
    matches = list(pattern.finditer(text))
    if not matches:
        return None
    return matches[-1].group(1) if pattern.groups else matches[-1].group()
