"""`asyncrl filters`: the list, an explanation, and a start of one's own."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from asyncrl.engine.cli.filters import app
from asyncrl.filters import load as loading
from asyncrl.filters.load import BUILT_IN


def in_process(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str]:
    """Run `asyncrl filters ...` in a folder; return its exit code and what it said."""
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(app, arguments)
    return done.exit_code, done.output


@pytest.mark.parametrize("arguments", [(), ("list",)])
def test_the_list_names_every_built_in_with_a_line_of_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    _, text = in_process(tmp_path, monkeypatch, *arguments)
    lines = {line.split()[0]: line for line in text.splitlines() if line}
    for name in BUILT_IN:
        assert len(lines[name].split()) > 3


def test_an_installed_filter_that_is_broken_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "asyncrl_broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: asyncrl-broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{loading.ENTRY_POINT_GROUP}]\ngone = no_such_module:Gone\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    code, text = in_process(tmp_path, monkeypatch, "list")
    assert code == 0
    assert "cannot be loaded: filter gone" in text
    assert "zero_std" in text


def test_show_explains_parameters_tags_and_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, text = in_process(tmp_path, monkeypatch, "show", "staleness")
    assert "max_age: int | null, default None" in text
    assert "needs tags: version, dataset" in text
    assert "drops for: stale, stale_tokens" in text


def test_show_says_how_to_write_a_filter_of_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("")
    code, text = in_process(tmp_path, monkeypatch, "show", "mine")
    assert (code, "for one in mine.py, write mine:Class" in text) == (2, True)


@pytest.mark.parametrize(
    ("name", "files"),
    [("ABTest", "ab_test"), ("HTTPLength", "http_length"), ("short_only", "short_only"), ("x", "x")],
)
def test_a_name_becomes_a_class_and_a_module_as_python_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, files: str
) -> None:
    assert in_process(tmp_path, monkeypatch, "new", name)[0] == 0
    assert {path.name for path in tmp_path.iterdir()} == {f"{files}.py", f"test_{files}.py"}
    title = "ShortOnly" if name == "short_only" else name[0].upper() + name[1:]
    assert f"class {title}(" in (tmp_path / f"{files}.py").read_text()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("random", "would hide the installed module random"),
        ("ZeroStd", "zero_std is a built-in filter"),
        ("TestLength", "pytest would take test_length.py for a test"),
        ("my-filter", "a class name has letters"),
        ("a/b", "a class name has letters"),
        ("class", "a class name has letters"),
    ],
)
def test_a_name_that_would_not_work_is_refused_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    code, text = in_process(tmp_path, monkeypatch, "new", name)
    assert (code, says in text) == (2, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("arguments", "says"), [(("show", "zero_stt"), "zero_std"), (("new", "2bad"), "class name")])
def test_a_bad_name_ends_with_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], says: str
) -> None:
    code, text = in_process(tmp_path, monkeypatch, *arguments)
    assert (code, says in text) == (2, True)
