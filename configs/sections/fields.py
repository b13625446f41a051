"""What all sections are, and the ranges of their numbers."""

import os
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

# Upper limits are far above what a run can use. Without them sums could leave 64 bits and factors float32.
MAX_COUNT = 2**31 - 1
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
ZeroOrMore = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Few = Annotated[int, Field(ge=1, le=4096)]
"""Processes, threads, layers, heads."""
Width = Annotated[int, Field(ge=1, le=1_000_000)]
Groups = Annotated[int, Field(ge=1, le=1_000_000)]
Versions = Annotated[int, Field(ge=0, le=1_000_000)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
Factor = Annotated[float, Field(gt=0, le=1e6)]
LearningRate = Annotated[float, Field(gt=0, le=10)]
MIN_TEMPERATURE = 1e-6
"""Divided by less than this, logits may not stay finite."""
Text = Annotated[str, Field(min_length=1)]
"""A text that is not empty."""
Place = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]
"""A file, a folder or a name. A shell expands no `~` behind `--set section.key=`, and YAML never does."""
Fraction = Annotated[float, Field(gt=0, lt=1)]


def switch(value: Any) -> Any:
    """Return `on` and `off` as texts: YAML reads them as true and false."""
    return ("off", "on")[value] if isinstance(value, bool) else value


def named(key: str, example: str) -> BeforeValidator:
    """Read an entry of a list: a text alone is a map of `key`; ValueError, with an example, if it is neither."""

    def entry(value: Any) -> Any:
        if isinstance(value, str):
            return {key: value}
        if not isinstance(value, Mapping):
            raise ValueError(f"it must be a {key} alone, or a map, as in {example}")
        return value

    return BeforeValidator(entry)


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
