"""Conversations of several turns, in place of single responses."""

from typing import Any, Literal

from asyncrl.configs.sections.fields import Count, Seconds, Section


class EnvironmentSection(Section):
    name: str | None
    """`calculator`, `guess`, `reasoning_gym`, or `module:Class` (also `file.py:Class`) of your own environment, which
    answers the model's turns and says what they are worth; `agent`: a function that asks the model over HTTP;
    `verifiers`: an environment of the package verifiers; null: a sample is one response, which the task or rewards
    score."""
    options: dict[str, Any]
    """Keyword arguments of the environment's class; of `agent` its `function`, `module:function`; of `verifiers` its
    `taskset`, and what else verifiers' own `[env]` takes (docs/environments.md)."""
    max_turns: Count
    """A sample ends after so many turns of the model, as truncated. The longest turn is `rollout.max_new_tokens`."""
    max_tokens: Count
    """Longest response in tokens: all turns and what stands between them. A sample that comes to it is truncated."""
    step_timeout_s: Seconds
    """A sample whose environment takes longer to answer a turn, or whose agent takes longer from one answer to its next
    request or its end, fails (cause `environment_timeout`)."""
    tool_timeout_s: Seconds
    """Longest call of a tool; what a later one does, `on_tool_error` says (cause `tool_timeout`)."""
    on_tool_error: Literal["feed_back", "fail"]
    """What a tool's error does, and a call that cannot be read. `feed_back`: the model is told; `fail`: the sample
    fails (cause `tool_error`)."""

    @property
    def is_agent(self) -> bool:
        """Whether what asks the model is a function of the user's or of `verifiers`, which writes its own messages."""
        return self.name in ("agent", "verifiers")
