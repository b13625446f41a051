"""Ray's processes answer whoever has the run's token, and nobody else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

_ASK = """
import sys
from ray._raylet import GcsClient
try:
    GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None)
    print("answered")
except Exception as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize(
    "given", [{"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}]
)
def test_without_the_token_of_the_run_ray_refuses_every_call(given: dict[str, str], cluster: None) -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    assert _asked({**own, **given}) == "AuthenticationError"


def test_the_token_is_in_a_file_of_the_users_and_in_no_variable(cluster: None) -> None:
    file = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.read_text(encoding="utf-8") not in os.environ.values()
    assert _asked(dict(os.environ)) == "answered"


def _asked(environment: dict[str, str]) -> str:
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", _ASK, address]
    asked = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    return asked.stdout.strip()
