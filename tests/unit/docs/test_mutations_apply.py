"""The faults of `scripts/mutate` still fit the code, and one that does not is refused, never passed over."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
AREAS = {
    "bounds",
    "book",
    "data",
    "filters",
    "front_end",
    "gate",
    "groups",
    "loss",
    "planner",
    "publishing",
    "replay",
    "step",
}


def _mutations() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutations", ROOT / "scripts" / "mutations.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Where dataclasses look for it.
    spec.loader.exec_module(module)
    return module


mutations = _mutations()


def test_every_fault_can_be_planted_and_names_tests_that_exist() -> None:
    """Where this fails a file, a function or a line has moved: mend the record in tests/mutations."""
    problems: list[str] = []
    known = mutations.catalogue()
    for mutation in known:
        try:
            mutation.planted(ROOT)
        except mutations.BadMutation as error:
            problems.append(str(error))
        lacking = [test for test in mutation.tests if not (ROOT / test.partition("::")[0]).is_file()]
        problems += [f"{mutation.name}: there is no {test}" for test in lacking]
    assert problems == []
    assert {mutation.name.partition("/")[0] for mutation in known} >= AREAS
    assert sum(not mutation.equivalent for mutation in known) >= 40


CODE = """
def limit(x):
    return x > 3

class Gate:
    def limit(self, x):
        '''Say whether x > 3.'''
        return x >= 3 or x >= 30
"""


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"function": "engine.gone:limit"}, "there is no engine"),
        ({"function": "engine.gate:limits"}, "0 of limits"),
        ({"function": "engine.gate:Gate.open"}, r"0 of Gate\.open"),
        ({"pattern": "x < 3"}, "0 times, not once"),
        ({"function": "engine.gate:Gate.limit", "pattern": "x >= 3"}, "2 times, not once"),
        ({"replacement": "x >"}, "is no Python"),
        ({"replacement": "x  >  3"}, "changes no code"),
    ],
)
def test_a_fault_that_does_not_fit_is_refused_with_its_name(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "gate.py").write_text(CODE)
    record = {"function": "engine.gate:limit", "pattern": "x > 3", "replacement": "x >= 3", "tests": ("a",)}
    # The pattern stands twice in the file and once in the function.
    changed = mutations.Mutation(name="off by one", **record).planted(tmp_path)
    assert changed == CODE.replace("return x > 3", "return x >= 3")
    with pytest.raises(mutations.BadMutation, match=rf"off by one: .*{says}"):
        mutations.Mutation(name="off by one", **{**record, **change}).planted(tmp_path)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ('function = "a:b"\npattern = "x"\nreplacement = "y"', "'tests'.* missing"),
        ('function = "a:b"\npattern = "x"\nreplacement = "y"\ntests = []', "names no tests"),
        ('function = "a:b"\npattern = "x"\nreplacement = "y"\ntests = ["t"]\nline = 3', "'line'.* unknown"),
    ],
)
def test_a_record_that_lacks_something_is_refused(tmp_path: Path, record: str, says: str) -> None:
    (tmp_path / "area.toml").write_text(f'[[mutation]]\nname = "one"\n{record}\n')
    with pytest.raises(mutations.BadMutation, match=f"area/one: .*{says}"):
        mutations.catalogue(tmp_path)


def test_two_faults_of_one_name_are_refused(tmp_path: Path) -> None:
    one = '[[mutation]]\nname = "one"\nfunction = "a:b"\npattern = "x"\nreplacement = "y"\ntests = ["t"]\n'
    (tmp_path / "area.toml").write_text(one + one)
    with pytest.raises(mutations.BadMutation, match="two records have this name"):
        mutations.catalogue(tmp_path)
