"""Training of a low-rank adapter instead of all weights."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from asyncrl.configs.sections.fields import Few, Section


def _modules(value: Any) -> Any:
    """Check in one place: a field of two types would name both, and neither key nor example."""
    if value != "auto" and not (isinstance(value, list) and value and all(isinstance(name, str) for name in value)):
        raise ValueError("it must be auto, or a list of ends of layers' names, such as [q_proj, v_proj]")
    return value


class Lora(Section):
    rank: Few | None
    """Train an adapter of this rank, and leave the model's own weights as they are (LoRA, by the package `peft`); null:
    train all weights. An adapter takes a learning rate about ten times as high."""
    alpha: Annotated[float, Field(gt=0, le=1e6)] | None
    """The adapter's product is multiplied by alpha / rank; null: alpha is twice the rank."""
    target_modules: Annotated[Literal["auto"] | Annotated[list[str], Field(min_length=1)], BeforeValidator(_modules)]
    """Which layers get an adapter: the ends of their names, such as `[q_proj, v_proj]`. `auto`: all linear layers but
    the output head."""

    @property
    def factor(self) -> float:
        """`alpha` as it is used: with rank 8 and alpha null, 16."""
        assert self.rank is not None
        return 2 * self.rank if self.alpha is None else self.alpha
