"""The guide on the data plane: its code runs, and the options it names exist."""

import re
from pathlib import Path
from typing import Any

import torch

from asyncrl.configs.sections.data_plane import DataPlane

TEXT = (Path(__file__).parents[3] / "docs" / "data-plane.md").read_text(encoding="utf-8")


def test_the_task_of_the_guide_brings_a_tensor_of_the_prompt_with_every_reward() -> None:
    names: dict[str, Any] = {"__name__": "guide"}
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.S)
    exec(compile(block, "docs/data-plane.md", "exec"), names)
    task = names["Pictures"]()
    reward = task.score(task.prompts()[7], "7")
    assert set(reward.extras) == set(task.extras)
    assert torch.equal(reward.extras["pixel_values"], torch.full((2, 3), 7.0))


def test_the_options_of_the_guide_exist() -> None:
    named = set(re.findall(r"`data_plane\.(\w+)", TEXT))
    assert named >= {"shared_memory", "storage_units", "lease_s"}
    assert named - set(DataPlane.model_fields) == set()
