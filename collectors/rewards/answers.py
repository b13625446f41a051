"""What a record says is right, and what of a response is compared with it."""

import re

from asyncrl.engine.records import Prompt


def expected(prompt: Prompt, field: str) -> str:
    """Return a field of the prompt's record as text, `answer` being the prompt's own; ValueError if there is none."""
    value = prompt.answer if field == "answer" and prompt.answer else prompt.fields.get(field)
    if value is None:
        raise ValueError(
            f"prompt {prompt.id!r} has no field {field!r}; it has {', '.join(map(str, prompt.fields)) or 'none'}"
        )
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
