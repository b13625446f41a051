"""The prompts of evaluations that come from data sets: sets of their own, or the records that training holds out.

Invariant: which prompts these are does not depend on a run's seed, and training draws none of those held out.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from asyncrl.collectors.data.check import CHECKED_RECORDS
from asyncrl.collectors.data.columns import Columns
from asyncrl.collectors.data.open import open_sets, open_shots
from asyncrl.collectors.data.permutation import Permutation
from asyncrl.collectors.data.prompts import DataPrompts, Limits, share_of
from asyncrl.collectors.data.renderer import Renderer
from asyncrl.collectors.environments.tools import Tools, schemas
from asyncrl.configs import RunConfig
from asyncrl.engine.errors import ConfigError, DataError
from asyncrl.engine.model.tokenizer import load_tokenizer
from asyncrl.engine.records import Prompt


def evaluation_records(config: RunConfig, tools: Tools = ()) -> list[Prompt]:
    """Return the prompts of `evaluation.path` or `sets`, or else those that `data.holdout` holds out of training.

    At most `evaluation.max_prompts`, of each set in turn, in an order that is the same in every run. ConfigError for a
    set that cannot be opened, a bad record unless such are skipped, two records with one id, or if no prompt is left.
    """
    asked = config.evaluation
    own = asked.path is not None or bool(asked.sets)
    source = config.data
    if own:
        source = source.model_copy(update={"path": asked.path, "split": asked.split, "sets": asked.sets})
    tokenizer = load_tokenizer(config.model.path, add_bos=config.rollout.add_bos)
    records = DataPrompts(
        open_sets(source),
        Columns.of(source),
        Renderer(source, open_shots(source), tokenizer, tools=schemas(tools), raw=config.environment.is_agent),
        replace(Limits.of(config), holdout=0.0),
        seed=0,
        epochs=1,
    )
    largest = max(len(entry.records) for entry in records.sets)
    if largest > CHECKED_RECORDS and asked.max_prompts is None:
        raise ConfigError(
            f"evaluation would read all records of a set of {largest:,}; set evaluation.max_prompts to a number of "
            "prompts to be evaluated"
        )
    try:
        share = None if own else config.data.holdout
        sets = [_of(records, which, share) for which in range(len(records.sets))]
        found = list(islice(_in_turn(sets), asked.max_prompts))
    except DataError as error:
        raise ConfigError(str(error)) from error
    where = "the records of evaluation.path or evaluation.sets"
    if not own:
        where = f"those held out (data.holdout {config.data.holdout:g})"
    if not found and own:
        raise ConfigError(f"{where} have no prompt of {records.limits.tokens} to evaluate")
    if not found:
        raise ConfigError(f"of {records.prompts} records none is both among {where} and of {records.limits.tokens}")
    _check_ids(found, where)
    return found


def _of(records: DataPrompts, which: int, share: float | None) -> Iterator[Prompt]:
    """Yield the prompts of one set, in a fixed order; with a `share`, those that so much of a holdout keeps."""
    entry = records.sets[which]
    order = Permutation(len(entry.records), f"evaluation {entry.name}")
    for place in range(len(entry.records)):
        index = order(place)
        try:
            prompt = records.prompt(which, index, records.record(which, index))
            drawn = share is not None and share_of(prompt.id) >= share
            left_out = drawn or records.why_left_out(prompt, entry.records.place(index))
        except DataError:
            if not records.limits.skip_bad:
                raise
            continue
        if not left_out:
            yield prompt


def _in_turn(sets: list[Iterator[Prompt]]) -> Iterator[Prompt]:
    """Yield one of each in turn, for as long as each has any."""
    while sets:
        left = []
        for prompts in sets:
            prompt = next(prompts, None)
            if prompt is not None:
                left.append(prompts)
                yield prompt
        sets = left


def _check_ids(prompts: list[Prompt], where: str) -> None:
    seen: set[int | str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise ConfigError(f"{where}: two records have the id {prompt.id!r} (data.id_column); ids must be unique")
        seen.add(prompt.id)
