"""A response as a score sees it: its text, and what the text does not tell."""

from typing import Any


class Response(str):
    """The decoded text of a response, without the end token: a string, with two figures of its generation.

    `tokens` counts its tokens, and `finished` says whether it ended by itself, not by `rollout.max_new_tokens`. Both
    are None for a text that no engine made, as in a test.
    """

    tokens: int | None
    finished: bool | None

    def __new__(cls, text: str, *, tokens: int | None = None, finished: bool | None = None) -> "Response":
        made = super().__new__(cls, text)
        made.tokens, made.finished = tokens, finished
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (str(self), self.tokens, self.finished)


def _restored(text: str, tokens: int | None, finished: bool | None) -> Response:
    return Response(text, tokens=tokens, finished=finished)
