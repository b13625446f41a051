"""Training of a low-rank adapter instead of all weights."""

from typing import Annotated, Literal

from pydantic import Field

from asyncrl.configs.sections.fields import Few, Section


class Lora(Section):
    rank: Few | None
    """Train an adapter of this rank, and leave the model's own weights as they are (LoRA, by the package `peft`); null:
    train all weights. An adapter takes a learning rate about ten times as high."""
    alpha: Annotated[float, Field(gt=0, le=1e6)] | None
    """The adapter's product is multiplied by alpha / rank; null: alpha is twice the rank."""
    target_modules: Literal["auto"] | Annotated[list[str], Field(min_length=1)]
    """Which layers get an adapter: the ends of their names, such as `[q_proj, v_proj]`. `auto`: all linear layers but
    the output head."""

    @property
    def factor(self) -> float:
        """`alpha` as it is used: with rank 8 and alpha null, 16."""
        assert self.rank is not None
        return 2 * self.rank if self.alpha is None else self.alpha
