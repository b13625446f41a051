"""What is shipped: one package in the wheel, everything needed in the sdist, extras that resolve."""

import email
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("engine", "collectors", "filters", "trainers", "configs")
BUILD = "import sys, hatchling.build as b; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"


def pip(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(kind: str, source: Path, out: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", BUILD, kind, str(out)],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


def files_of(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def modules() -> set[str]:
    """Every module and data file of the repository's five folders."""
    return {
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".yaml")
    }


@pytest.mark.timeout(300)
def test_the_wheel_holds_one_package_and_nothing_else(wheel: Path) -> None:
    names = {name for name in files_of(wheel) if ".dist-info/" not in name}
    assert {name.partition("/")[0] for name in names} == {"asyncrl"}
    assert {name for name in names if name.endswith((".py", ".yaml"))} == {
        *(f"asyncrl/{name}" for name in modules()),
        "asyncrl/__init__.py",
        "asyncrl/__main__.py",
    }
    assert {"asyncrl/py.typed", "asyncrl/configs/presets/default.yaml", "asyncrl/configs/presets/reverse.yaml"} <= names
    assert not any("__pycache__" in name or "/tests/" in name for name in names)


@pytest.mark.timeout(300)
def test_the_wheel_brings_the_command_and_the_licence(wheel: Path) -> None:
    files = files_of(wheel)
    (points,) = (text.decode() for name, text in files.items() if name.endswith("entry_points.txt"))
    assert "asyncrl = asyncrl.engine.cli:main" in points
    assert any(name.endswith("licenses/LICENSE") for name in files)


@pytest.mark.timeout(300)
def test_the_sdist_builds_the_same_wheel(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    """No link enters an artifact; tests, README and licence come along."""
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
        assert all(member.isfile() or member.isdir() for member in members)
        names = {member.name.partition("/")[2] for member in members}
        archive.extractall(tmp_path / "source", filter="data")
    assert {"README.md", "LICENSE", "pyproject.toml", "src/asyncrl/__init__.py"} <= names
    assert modules() <= names
    assert any(name.startswith("tests/unit/") for name in names)
    (source,) = (tmp_path / "source").iterdir()
    again = build("wheel", source, tmp_path)
    first, second = files_of(wheel), files_of(again)
    assert first.keys() == second.keys()
    assert all(first[name] == second[name] for name in first if not name.endswith("RECORD"))


@pytest.mark.timeout(300)
def test_the_wheel_runs_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    """Unpacked alone, it finds its presets, and no other `tests` or `scripts` is needed."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", "import asyncrl, asyncrl.engine.cli as c; print(asyncrl.__file__); c.app(['config'])"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))
    assert "rollout.max_staleness" in done.stdout


def requirements(wheel: Path, extra: str, **environment: str) -> list[Requirement]:
    """Return what an extra asks for in an environment (this one's, unless told)."""
    files = files_of(wheel)
    (text,) = (content for name, content in files.items() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(text)
    assert extra in metadata.get_all("Provides-Extra", [])
    found = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    given: Any = {**environment, "extra": extra}
    without: Any = {**environment, "extra": ""}
    return [r for r in found if r.marker and r.marker.evaluate(given) and not r.marker.evaluate(without)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("extra", "python", "system", "wanted"),
    [
        ("vllm", "3.11", "linux", ["vllm==0.32.*"]),
    ],
)
def test_an_extra_asks_for_what_its_python_can_have(
    wheel: Path, extra: str, python: str, system: str, wanted: list[str]
) -> None:
    found = requirements(wheel, extra, python_version=python, sys_platform=system)
    assert [f"{r.name}{r.specifier}" for r in found] == wanted


def resolve(*requirements: str, python: str, deps: bool, target: Path) -> list[tuple[str, str]]:
    """Let pip resolve without installing; return names and versions.

    Without dependencies, for any Python, pip checks a distribution's own bound against the wrong one.
    """
    report = pip(
        *("install", "--dry-run", "--quiet", "--ignore-installed", "--report", "-", "--only-binary", ":all:"),
        *(() if deps else ("--ignore-requires-python",)),
        *("--python-version", python, "--target", str(target), *(() if deps else ("--no-deps",))),
        *requirements,
    )
    return [
        (canonicalize_name(item["metadata"]["name"]), item["metadata"]["version"])
        for item in json.loads(report)["install"]
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("extra", "python"), [("vllm", "3.11")])
def test_the_index_has_what_an_extra_asks_for(wheel: Path, extra: str, python: str, tmp_path: Path) -> None:
    (wanted,) = requirements(wheel, extra, python_version=python, sys_platform="linux")
    ((name, version),) = resolve(f"{wanted.name}{wanted.specifier}", python=python, deps=False, target=tmp_path)
    assert name == wanted.name
    assert wanted.specifier.contains(version)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("extra", ["vllm"])
def test_an_extra_resolves_with_all_that_it_needs(wheel: Path, extra: str, tmp_path: Path) -> None:
    """Everything together: no two requirements of asyncrl and the extra exclude each other."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = dict(resolve(f"{wheel}[{extra}]", python=python, deps=True, target=tmp_path))
    (wanted,) = requirements(wheel, extra)
    assert wanted.name in found
    assert found["transferqueue"] == "0.1.11"
