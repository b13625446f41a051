"""A task whose responses stay as long as the model makes them: to study generation with a long tail of lengths."""

from asyncrl.collectors.tasks.base import Reward
from asyncrl.collectors.tasks.digits import Echo
from asyncrl.engine.records import Prompt


class LongTail(Echo):
    """`7>` asks for a first character whose code is odd, `8>` for an even one; what comes behind it does not matter.

    A model from random weights ends a response with equal chance at each token, so lengths are distributed
    geometrically: some are five times the mean. Nothing in the reward speaks for shorter or longer ones.
    """

    def score(self, prompt: Prompt, response: str) -> Reward | float:
        return float(bool(response) and ord(response[0]) % 2 == int(prompt.answer) % 2)
