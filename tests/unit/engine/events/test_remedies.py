"""What is advised against each cause for which samples are lost."""

import re

import pytest

from asyncrl.configs import load
from asyncrl.engine.events import remedies
from asyncrl.engine.events.remedies import remedy, with_options
from asyncrl.filters.judging import namespaced
from asyncrl.filters.load import BUILT_IN

CONFIG = load().config.model_dump()


@pytest.mark.parametrize("reason", remedies._REMEDIES)
def test_every_option_that_a_remedy_names_exists_and_is_shown_with_its_value(reason: str) -> None:
    named = re.findall(r"\{(\w+)\.(\w+)\}", remedies._REMEDIES[reason])
    assert all(key in CONFIG[section] for section, key in named)
    text = remedy(f"dropped:{reason}", CONFIG)
    assert all(f"{section}.{key} (now {CONFIG[section][key]})" in text for section, key in named)
    assert "{" not in text + remedy(f"dropped:{reason}", {})


def test_a_remedy_for_a_filters_reason_is_for_one_that_it_gives() -> None:
    given = {namespaced(n, r) for n, f in BUILT_IN.items() for r in (*f.drop_reasons, *f.mask_reasons)}
    named = {reason for reason in remedies._REMEDIES if remedies.filter_of(reason) in BUILT_IN}
    assert named <= given


def test_what_is_not_known_is_told_where_to_look() -> None:
    assert remedy("dropped:MyFilter/bad", CONFIG) == "see `asyncrl filters show MyFilter`"
    assert remedy("failed:odd", CONFIG) == "log.jsonl has the errors"
    assert with_options("raise {run.nothing}", CONFIG) == "raise run.nothing"
