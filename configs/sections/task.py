"""What is asked, and what an answer is worth."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from asyncrl.configs.sections.fields import Count, Factor, Place, Section, Text, named, switch


class Task(Section):
    name: str
    """`echo`, `reverse`, `sleepy`, `long_tail`, `reasoning_gym`, or `module:Class` (also `file.py:Class`) of your own
    task."""
    epochs: Count | None
    """Passes over the task's prompts, or over the records of `data`; null: no limit."""
    options: dict[str, Any]
    """Keyword arguments of the task's class."""
    retire_after: Count | None
    """Leave out a prompt for the rest of the run after this many of its groups failed without a good one in between;
    null: never."""


class DataSet(Section):
    """One entry of `data.sets`; what it leaves out is None."""

    path: Place
    name: Text | None = None
    weight: Factor | None = None
    split: str | None = None


def _shots(value: Any) -> Any:
    """Check examples in one place: a field of two types would name both, and neither entry nor key."""
    for number, entry in enumerate(value if isinstance(value, list) else ()):
        fits = isinstance(entry, Mapping) and all(isinstance(text, str) for text in entry.values())
        if not fits:
            raise ValueError(f"entry {number} is {entry!r}; it must be a map of texts, `prompt` and `answer`")
    if not isinstance(value, list | str):
        raise ValueError("it must be a list of maps with `prompt` and `answer`, or a JSONL file")
    return value


class Data(Section):
    path: Place | None
    """Prompts from one data set: a file (.jsonl, .parquet), a folder that `datasets` saved, or the name of a data set
    in its cache; null: the task lists its own prompts, or `sets` has several."""
    split: str | None
    """Split of `path`, for a data set of `datasets` that has several."""
    sets: list[Annotated[DataSet, named("path", "{path: a.jsonl, weight: 2}")]]
    """Several data sets, as a mixture. Each entry is a path alone, or has `path`, and may have `name` (default: that of
    the file, without its ending), `weight` (default: its number of records) and `split`."""
    prompt_column: str
    """Field with the prompt: a text, or chat messages (a list of maps with `role` and `content`)."""
    answer_column: str | None
    """Field with the answer, which rewards compare with; null: records have none."""
    id_column: str | None
    """Field with an id, a text or an integer, unique over all sets; null: the set's name and the record's number, as in
    `train:17`."""
    dataset_column: str | None
    """Field with the name under which a prompt is counted; null: the set's name."""
    prompt_format: str
    """Text of a prompt, with {prompt} where the record's goes; for prompts that are texts, also those of `few_shot`."""
    system_prompt: str | None
    """System message before every chat that does not begin with one; null: none. It needs a chat template."""
    chat_template: Annotated[Literal["auto", "on", "off"], BeforeValidator(switch)]
    """Whether prompts go through the tokenizer's chat template, a text as one message of the user. `auto`: if the
    tokenizer has one."""
    few_shot: Annotated[list[dict[str, str]] | str, BeforeValidator(_shots)]
    """Examples in front of every prompt: a list of maps with `prompt` and `answer`, or a JSONL file with the columns
    above. Through a chat template they are earlier turns, else text with an empty line behind each answer."""
    max_prompt_tokens: Count | None
    """Leave out prompts of more tokens than this, and count them; null: no limit."""
    min_prompt_tokens: Count
    """Leave out prompts of fewer tokens than this, and count them."""
    holdout: Annotated[float, Field(ge=0, lt=1)]
    """Share of the records that is never trained on, chosen by a hash of the id: the same in every run."""
    on_bad_record: Literal["error", "skip"]
    """What a record does that cannot be used. `error`: it ends the run, before the start if it is found then; `skip`:
    it is left out and counted."""
    fetch: bool
    """Whether `datasets` may download a data set that is not in its cache."""

    @property
    def given(self) -> bool:
        """Whether prompts come from data sets, not from the task."""
        return self.path is not None or bool(self.sets)


class RewardSection(Section):
    functions: list[Annotated[dict[str, Any], named("name", "{name: exact_match, weight: 2}")]]
    """What scores responses, for a task that does not score itself: for each its name alone, or its `name` (built in,
    `module:function` or `file.py:function`), its `weight` in the sum (1), its name `part` in tags and metrics, and its
    own parameters."""
    on_failure: Annotated[float, Field(ge=-1e6, le=1e6)] | None
    """Reward of a sample whose score failed or took too long; null: the sample fails. If all samples of a group failed,
    the group fails either way."""
