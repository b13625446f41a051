"""`asyncrl doctor`: every item, what is missing, and how to get it."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from asyncrl.engine.cli.doctor import Finding, examine, report
from asyncrl.engine.cli.doctor import _extra as extra
from asyncrl.engine.cli.doctor import _folder as writable
from asyncrl.engine.cli.doctor import _package as package

EXTRAS = ("agents", "data", "lora", "math", "megatron", "mooncake", "smollm2", "verifiers", "vllm")


def shown(findings: list[Finding]) -> tuple[int, str]:
    out = io.StringIO()
    code = report(findings, Console(file=out, width=160))
    return code, out.getvalue()


def test_it_looks_at_everything_a_run_needs() -> None:
    found = {finding.what: finding for finding in examine()}
    needed = ["Python", "torch", "ray", "transferqueue", "transformers", "loopback ports", "memory", "shared memory"]
    needed.append("folder")
    assert list(found) == [*needed, "GPU", *(f"extra {name}" for name in EXTRAS)]
    assert [name for name, finding in found.items() if finding.required] == needed
    assert all(found[name].ok for name in needed[:6])
    assert all(finding.advice for finding in found.values() if not finding.ok)


def test_a_folder_that_cannot_be_written_to_keeps_a_run_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FOUND-I16: where `runs` cannot be made or used."""
    monkeypatch.chdir(tmp_path)
    assert writable().ok
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs").write_text("")
    finding = writable()
    assert (finding.ok, finding.required) == (False, True)
    assert str(tmp_path / "runs") in finding.found


def test_what_is_missing_is_shown_with_how_to_get_it() -> None:
    code, text = shown(
        [
            Finding("torch", False, "2.1.0", "pip install 'torch>=2.11'"),
            Finding("ray", True, "2.60.0", "not shown"),
            Finding("extra vllm", False, "not installed", "pip install 'asyncrl[vllm]'", required=False),
        ]
    )
    assert code == 1
    torch, ray, vllm = (next(line for line in text.splitlines() if name in line) for name in ("torch", "ray", "vllm"))
    assert "MISSING" in torch
    assert "2.1.0" in torch
    assert "pip install 'torch>=2.11'" in torch
    assert "not shown" not in ray
    assert "MISSING" not in vllm
    assert "pip install 'asyncrl[vllm]'" in vllm
    assert "cannot run here: torch" in text


def test_only_what_is_required_keeps_a_run_from_starting() -> None:
    code, text = shown([Finding("GPU", False, "none [cpu only]", "not needed", required=False)])
    assert code == 0
    assert "none [cpu only]" in text
    assert "can run here." in text


@pytest.mark.parametrize(
    ("name", "wanted", "exact", "ok"),
    [
        ("torch", "2.11", False, True),
        ("torch", "999.0", False, False),
        ("pydantic", "2.9", False, True),
        ("transferqueue", "0.1.11", True, True),
        ("transferqueue", "0.1.10", True, False),
        ("no-such-package-here", "1.0", False, False),
    ],
)
def test_a_package_is_judged_by_its_version(name: str, wanted: str, exact: bool, ok: bool) -> None:
    finding = package(name, wanted, exact=exact)
    assert (finding.ok, finding.required) == (ok, True)
    assert f"pip install '{name}{'==' if exact else '>='}{wanted}'" in finding.advice


def test_an_extra_is_found_by_its_module() -> None:
    assert extra("here", "json.decoder", "").ok
    for module in ("no_such_module_here", "no_such_module_here.below"):
        finding = extra("gone", module, "get it")
        assert (finding.ok, finding.required, finding.advice) == (False, False, "get it")
