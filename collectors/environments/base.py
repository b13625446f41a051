"""An environment: what it says to each turn of the model, and what that is worth. Subclass it, name `module:Class`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.collectors.environments.tools import Tools
from asyncrl.collectors.tasks.base import Task
from asyncrl.engine.records import Prompt

Message = Mapping[str, Any]
"""A chat message: `role` and `content`."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model has just said: its text, without the end token, and the turn's number, from 0.

    `finished` is False if a limit of tokens cut it; then it is the last turn.
    """

    text: str
    number: int
    finished: bool


@dataclass(frozen=True, slots=True)
class Step:
    """What an environment says to a turn: `reply`, a text or chat messages, unless it is `done`.

    The rewards of all steps of a sample are added up; so are `parts` of the same name, which become tags.
    """

    reply: str | Sequence[Message] = ""
    done: bool = False
    reward: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)


class Environment(Task):
    """Plays each sample of a group by itself. `prompts` lists what it asks, unless `data` has the prompts.

    One object plays all samples of a collector at once, in its event loop: what belongs to a sample is in the state
    that `reset` returns, and nothing may block (`anyio.to_thread.run_sync` takes what does).

    What `reset` or `step` raises fails its sample (cause `environment_error`), and so does one that takes longer than
    `environment.step_timeout_s` (`environment_timeout`); it is never reward 0.
    """

    tools: Tools = ()
    """What the model may call between its turns; needs a chat template."""

    async def reset(self, prompt: Prompt, seed: int) -> Any:
        """Return the state of a new sample. The samples of a group have one `seed`, so they meet the same world."""
        return None

    async def step(self, state: Any, turn: Turn) -> Step:
        """Answer a turn in which no tool was called. A limit may end the sample after any step."""
        raise TypeError(f"{type(self).__name__} does not say what a turn leads to: write `step`")
