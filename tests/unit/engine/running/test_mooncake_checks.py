"""Mooncake where it cannot work is refused before a run, by option and value."""

from importlib.util import find_spec
from typing import Any

import pytest

from asyncrl.configs import Override, load
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.running.checks import check_without_model


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"run.runtime": "local"}, "run.runtime 'local'"),
        ({"data_plane.capacity_rows": 99}, "capacity_rows .* 99; .* It must be null"),
        pytest.param(
            {},
            "scripts/install mooncake",
            marks=pytest.mark.skipif(find_spec("mooncake") is not None, reason="Mooncake is installed here"),
        ),
    ],
)
def test_mooncake_that_cannot_work_is_refused(options: dict[str, Any], said: str) -> None:
    given = {"data_plane.backend": "mooncake", **options}
    loaded = load(overrides=[Override(path, value, "here") for path, value in given.items()])
    with pytest.raises(ConfigError, match=rf"data_plane.backend \(from .*{said}"):
        check_without_model(loaded)
