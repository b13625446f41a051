"""How good the model is on prompts that it is not trained on, during a run and by `asyncrl eval`."""

from typing import Annotated, Literal

from pydantic import Field

from asyncrl.configs.sections.fields import Count, Place, Seconds, Section, named
from asyncrl.configs.sections.task import DataSet


class Evaluation(Section):
    every: Count | None
    """Evaluate after every so many training steps, beside training; null: a run has no evaluation."""
    at_start: bool
    """With `every`, evaluate version 0 too."""
    at_end: bool
    """With `every`, evaluate the last version too, once training is done."""
    path: Place | None
    """Evaluation prompts from one data set, as in `data.path`, with the columns and formats of `data`; null: `sets`, or
    the records that `data.holdout` holds out, or the evaluation prompts of the task."""
    split: str | None
    """Split of `path`, for a data set of `datasets` that has several."""
    sets: list[Annotated[DataSet, named("path", "{path: a.jsonl, name: b}")]]
    """Several evaluation data sets. Each entry is a path alone, or has `path`, and may have `name` (default: that of
    the file, without its ending) and `split`."""
    max_prompts: Count | None
    """Evaluate at most so many prompts: the same ones every time, of each data set in turn; null: all."""
    samples: Annotated[int, Field(ge=1, le=100_000)]
    """Responses per prompt. With more than one, pass@k is reported for powers of two up to this."""
    temperature: Annotated[float, Field(ge=0, le=1e3)]
    """Sampling temperature of evaluation; 0 takes the likeliest token. top_p, top_k, min_p and what ends a response
    are as in `rollout`."""
    max_new_tokens: Count | None
    """Longest response of an evaluation, in tokens; null: `rollout.max_new_tokens`."""
    seed: Annotated[int, Field(ge=0, lt=2**32)]
    """Seed of the samples: the same for every version and run, so that figures differ by the weights alone."""
    pass_reward: Annotated[float, Field(ge=-1e6, le=1e6)]
    """A response passes with a reward of at least this."""
    device: Literal["auto", "cpu", "cuda"]
    """Where evaluations generate, with an engine and weights of their own. `auto`: on GPUs if torch sees any, on the
    one after those of the ranks and collectors, in turn."""
    timeout_s: Seconds
    """An evaluation that takes longer is given up and counted as failed; training goes on."""

    @property
    def given(self) -> bool:
        """Whether evaluations have data sets of their own."""
        return self.path is not None or bool(self.sets)
