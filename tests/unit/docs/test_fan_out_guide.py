"""The guide on batches names what there is."""

import re
from pathlib import Path

from asyncrl.configs.sections.trainer import Trainer
from asyncrl.engine import metrics

TEXT = (Path(__file__).parents[3] / "docs" / "fan-out.md").read_text(encoding="utf-8")


def test_every_option_and_metric_of_the_guide_exists() -> None:
    known = {value for value in vars(metrics).values() if isinstance(value, str)}
    assert {name for name in re.findall(r"`(train/\w+)`", TEXT) if name not in known} == set()
    named = set(re.findall(r"`trainer\.(\w+)", TEXT))
    assert named >= {"updates_per_batch", "recompute_logprobs", "reference_kl", "fetch_policy", "forward_tokens"}
    assert named - set(Trainer.model_fields) == set()
