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


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"collector.count": 3}, "cluster.max_collectors is 2 and collector.count 3; it must be 3 at least, or null"),
        ({"rollout.max_staleness": 0}, "cluster.max_collectors is 2 and rollout.max_staleness 0"),
        ({"collector.engine": "http", "collector.servers": ["http://127.0.0.1:1"]}, "collector.engine http"),
    ],
)
def test_collectors_that_cannot_come_and_go_are_refused(options: dict[str, object], says: str) -> None:
    given = {"cluster.max_collectors": 2, "rollout.max_staleness": 2, **options}
    with pytest.raises(ConfigError, match=re.escape(says)):
        load("default", [Override(path, value, "test") for path, value in given.items()])


def test_a_head_of_odd_width_is_refused() -> None:
    """FOUND-I8: rotary positions turn pairs."""
    with pytest.raises(ConfigError, match=r"model\.heads is 3 and model\.hidden_size 63; a head has 21 dimensions"):
        load("default", [Override("model.heads", 3, "--set"), Override("model.hidden_size", 63, "--set")])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"trainer.sharding": "hybrid"}, r"sharding is hybrid and trainer\.shard_ranks None; hybrid needs a number"),
        (
            {"trainer.sharding": "full", "trainer.shard_ranks": 2},
            r"is full and trainer\.shard_ranks 2; .* be null",
        ),
        ({"trainer.shard_ranks": 2}, r"is none and trainer\.shard_ranks 2"),
        ({"trainer.sharding": "hybrid", "trainer.shard_ranks": 3}, r"shard_ranks is 3 and trainer\.ranks 4; .* divide"),
        ({"trainer.sharding": "hybrid", "trainer.shard_ranks": 1}, r"shard_ranks is 1 and .* at least 2"),
        ({"trainer.sharding": "hybrid", "trainer.shard_ranks": 4}, r"shard_ranks is 4 and .* sharding is full"),
        (
            {"trainer.reshard_after_forward": False},
            r"reshard_after_forward is false and trainer\.sharding none, .* must be null, or sharding full",
        ),
        ({"trainer.sharding": "full", "trainer.ranks": 1}, r"is full and trainer\.ranks 1; one rank has nobody"),
        ({"trainer.sharding": "full", "run.runtime": "local"}, r"is full and run\.runtime local, in which all ranks"),
        (
            {"trainer.sharding": "full", "lora.rank": 4},
            r"is full and lora\.rank 4; .* sharding must be none",
        ),
    ],
)
def test_shardings_that_cannot_be_are_refused(values: dict[str, object], message: str) -> None:
    given = {"trainer.ranks": 4, **values}
    with pytest.raises(ConfigError, match=message):
        load("default", [Override(path, value, "test") for path, value in given.items()])


@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        ({}, 1),
        ({"trainer.sharding": "full"}, 4),
        ({"trainer.sharding": "hybrid", "trainer.shard_ranks": 2}, 2),
    ],
)
def test_a_sharding_says_how_many_ranks_keep_a_model(values: dict[str, object], ranks: int) -> None:
    given = {"trainer.ranks": 4, **values}
    trainer = load("default", [Override(path, value, "test") for path, value in given.items()]).config.trainer
    assert (trainer.model_ranks, trainer.is_sharded) == (ranks, ranks > 1)


def test_saves_without_a_model_to_save_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"run\.save_every is 2 and run\.save_model false"):
        load(overrides=[Override("run.save_every", 2, "test"), Override("run.save_model", False, "test")])


def test_a_tilde_is_the_home_folder_which_no_shell_has_put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    paths = ("data.path", "evaluation.path", "model.path", "run.directory")
    config = load("default", [Override(path, "~/one", "--set") for path in paths]).config
    given = (config.data.path, config.evaluation.path, config.model.path, config.run.directory)
    assert given == ("/home/ada/one",) * 4
    several = load("default", [Override("data.sets", ["~/one.jsonl", {"path": "two~"}], "--set")]).config.data.sets
    assert [entry.path for entry in several] == ["/home/ada/one.jsonl", "two~"]


@pytest.mark.parametrize("value", ["q_proj", [], [1], None])
def test_layers_of_an_adapter_are_a_list_or_auto(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        load("default", [Override("lora.rank", 4, "--set"), Override("lora.target_modules", value, "--set it")])
    assert str(caught.value) == (
        f"--set it (lora.target_modules) is {value!r}; it must be auto, or a list of ends of layers' names, such as "
        "[q_proj, v_proj]"
    )
