"""`format`: whether a response keeps to its tags, such as `<think>…</think><answer>…</answer>`."""

import re

from asyncrl.engine.records import Prompt


class Format:
    """1 if the response is the tags in their order, each once, with nothing but blanks around them; else 0."""

    def __init__(self, tags: tuple[str, ...] = ("think", "answer")) -> None:
        odd = [tag for tag in tags if not re.fullmatch(r"[\w-]+", tag)]
        if odd or not tags or len(set(tags)) != len(tags):
            raise ValueError(f"tags are {list(tags)}; they must be names, each once, without brackets")
        self._marks = [f"<{slash}{tag}>" for tag in tags for slash in ("", "/")]
        self._shape = re.compile(r"\s*".join(["", *(f"<{tag}>.*</{tag}>" for tag in tags), ""]), re.DOTALL)

    def __call__(self, prompt: Prompt, response: str) -> float:
        return float(all(response.count(mark) == 1 for mark in self._marks) and bool(self._shape.fullmatch(response)))
