"""Where a run stands between two steps: what a checkpoint keeps of the loop, and what a resumed run takes from it."""

from asyncrl.engine.checkpoint.state import RunState
from asyncrl.engine.loop.balance import Balance
from asyncrl.engine.loop.core import Core
from asyncrl.engine.loop.dispatcher import Dispatcher
from asyncrl.engine.loop.prompt_source import PromptSource
from asyncrl.engine.loop.retirement import Retirement


class Position:
    """The registers of a loop that outlive its process."""

    def __init__(
        self, core: Core, prompts: PromptSource, retirement: Retirement, dispatcher: Dispatcher, balance: Balance
    ) -> None:
        self._core = core
        self._prompts = prompts
        self._retirement = retirement
        self._dispatcher = dispatcher
        self._balance = balance

    def state(self) -> RunState:
        """Return what the registers hold; between two steps (checkpointer.py)."""
        return RunState(
            self._core.state(),
            self._prompts.state(),
            self._retirement.state(),
            self._dispatcher.next_group,
            self._balance.turns(),
        )

    def restore(self, state: RunState, *, fence: int) -> None:
        """Take a checkpoint's state; `fence` is the number of the claim that has what was claimed then."""
        self._prompts.restore(state.prompts)
        self._retirement.restore(state.retirement)
        self._dispatcher.restore(state.next_group)
        self._balance.restore(state.turns)
        self._core.restore(state.core, self._prompts.grant, fence=fence)
