"""The schema: a meaning at every field, no default, frozen; the default preset gives every value."""

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import resources

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from asyncrl.configs import Override, RunConfig, load
from asyncrl.engine.errors import ConfigError


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in RunConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield name, field.annotation


def test_every_field_of_every_section_has_its_meaning_below_it() -> None:
    for _, section in sections():
        (node,) = ast.parse(inspect.getsource(section)).body
        assert isinstance(node, ast.ClassDef)
        body = node.body
        for field, after in zip(body, [*body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign):
                said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and after.value.value
                assert said, f"{section.__name__}.{ast.unparse(field.target)} has no meaning"


def test_no_field_has_a_default_in_the_schema() -> None:
    everything: list[type[BaseModel]] = [RunConfig, *(section for _, section in sections())]
    for section in everything:
        for name, field in section.model_fields.items():
            assert field.is_required(), f"{section.__name__}.{name} has a default"


def test_the_default_preset_holds_every_field_and_no_other() -> None:
    text = (resources.files("asyncrl.configs") / "presets" / "default.yaml").read_text(encoding="utf-8")
    tree = yaml.safe_load(text)
    assert list(tree) == list(RunConfig.model_fields)
    for name, section in sections():
        assert list(tree[name]) == list(section.model_fields)


def test_sections_are_frozen_and_strict() -> None:
    config = load("default").config
    for name, section in sections():
        value = getattr(config, name)
        with pytest.raises(ValidationError, match="frozen"):
            setattr(value, next(iter(section.model_fields)), None)
        with pytest.raises(ValidationError, match="Extra inputs"):
            section.model_validate({**value.model_dump(), "no_such_key": 1})
    with pytest.raises(ValidationError, match="frozen"):
        config.run = config.run  # type: ignore[misc]


NUMBERS = [
    (f"{name}.{field}", beyond)
    for name, section in sections()
    for field, info in section.model_fields.items()
    for kind, beyond in (("int", 10**23), ("float", 1e38), ("float", 1e300))
    if re.search(rf"\b{kind}\b", str(info.annotation)) and not str(info.annotation).startswith("list")
    # A reward may be any; some give a norm of 1e12 to switch the clipping of gradients off.
    if field != "stop_at_reward" and (field, beyond) != ("max_grad_norm", 1e38)
]


@pytest.mark.parametrize(("path", "beyond"), NUMBERS)
def test_no_number_may_be_beyond_all_measure(path: str, beyond: float) -> None:
    """FOUND-I8: it would overflow after the start, in float32 or in 64 bits."""
    with pytest.raises(ConfigError) as caught:
        load("default", [Override(path, beyond, "--set it")])
    assert str(caught.value).startswith(f"--set it ({path}) is {beyond!r}; it must be a")
    assert re.search(r"at most|less than", str(caught.value))


def test_a_temperature_that_divides_by_next_to_nothing_is_refused() -> None:
    """FOUND-I8: divided by 1e-300, logits are infinite."""
    with pytest.raises(ConfigError, match=r"rollout\.temperature is 1e-300; .* from 1e-06 on"):
        load("default", [Override("rollout.temperature", 1e-300, "--set")])


def test_a_head_of_odd_width_is_refused() -> None:
    """FOUND-I8: rotary positions turn pairs."""
    with pytest.raises(ConfigError, match=r"model\.heads is 3 and model\.hidden_size 63; a head has 21 dimensions"):
        load("default", [Override("model.heads", 3, "--set"), Override("model.hidden_size", 63, "--set")])


def test_saves_without_a_model_to_save_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"run\.save_every is 2 and run\.save_model false"):
        load(overrides=[Override("run.save_every", 2, "test"), Override("run.save_model", False, "test")])
