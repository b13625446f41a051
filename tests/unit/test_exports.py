"""What `import asyncrl` offers, and what it does not load."""

import subprocess
import sys

import asyncrl
from asyncrl.filters import verdict


def test_every_exported_name_is_there() -> None:
    for name in asyncrl.__all__:
        assert getattr(asyncrl, name) is not None
    assert set(asyncrl.__all__) <= set(dir(asyncrl))
    assert asyncrl.keep is verdict.keep
    assert not hasattr(asyncrl, "runs")


def test_every_exported_name_is_known_to_type_checkers() -> None:
    """The lazy table and the imports under TYPE_CHECKING name the same objects at the same places."""
    import ast
    from pathlib import Path

    tree = ast.parse(Path(asyncrl.__file__).read_text(encoding="utf-8"))
    typed = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("asyncrl.")
        for alias in node.names
    }
    assert typed == {name: f"asyncrl.{home}" for name, home in asyncrl._HOMES.items()}
    assert {*typed, "__version__"} == set(asyncrl.__all__)


def test_the_import_is_light() -> None:
    """Nothing heavy, and quick: importing costs what one file costs."""
    code = (
        "import sys, time\n"
        "began = time.process_time()\n"
        "import asyncrl\n"
        "seconds = time.process_time() - began\n"
        "print(seconds, [name for name in ('torch', 'ray', 'numpy', 'pydantic') if name in sys.modules])\n"
        "from asyncrl import BaseRolloutFilter, ConfigError, Task, keep, load_config, plan_batch\n"
        "print([name for name in ('torch', 'ray') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    first, second = done.stdout.splitlines()
    seconds, heavy = first.split(maxsplit=1)
    assert (heavy, second) == ("[]", "[]")
    assert float(seconds) < 0.1
