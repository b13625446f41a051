"""The schema: a meaning at every field, no default, frozen; the default preset gives every value."""

import ast
import inspect
from collections.abc import Iterator
from importlib import resources

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from asyncrl.configs import RunConfig, load, schema


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in RunConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield name, field.annotation


def test_every_field_of_every_section_has_its_meaning_below_it() -> None:
    tree = ast.parse(inspect.getsource(schema))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for _, section in sections():
        body = classes[section.__name__].body
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
