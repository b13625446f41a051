"""What is looked at before a run starts: every record of a small set, some of a large one."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from asyncrl.collectors.data.columns import Record
from asyncrl.collectors.data.prompts import HELD_OUT, DataPrompts
from asyncrl.engine.errors import ConfigError, DataError
from asyncrl.engine.records import Prompt

CHECKED_RECORDS = 100_000
"""Of a set of so many records all are checked at the start; of a larger one RUNS · RUN_RECORDS, and the others when
their turn comes."""
RUNS, RUN_RECORDS = 10, 100
"""A sample is so many runs of neighbours, evenly spread: a run lies in one or two row groups of a Parquet file."""
LONGEST = 1000
"""So many prompts, those of the longest records, are rendered, and their tokens counted."""

_Place = tuple[int, int]


@dataclass(slots=True)
class Checked:
    """What was found: the longest prompts that a run may draw, and whether all records were looked at.

    Of the `records` looked at, `bad` cannot be used, and `held_out` others training does not draw.
    """

    longest: Sequence[Prompt] = ()
    whole: bool = True
    records: int = 0
    held_out: int = 0
    bad: int = 0
    first: DataError | None = None
    ids: dict[int | str, _Place] = field(default_factory=dict)


def check_prompts(prompts: DataPrompts) -> Checked:
    """Check records as far as CHECKED_RECORDS says.

    ConfigError names the first bad record (file, line, field) unless bad ones are skipped; the two records that share
    an id; or what no prompt fits.
    """
    found = Checked()
    lengths: list[tuple[int, _Place]] = []
    for which, entry in enumerate(prompts.sets):
        whole = len(entry.records) <= CHECKED_RECORDS
        found.whole = found.whole and whole
        for index in range(len(entry.records)) if whole else _sample(len(entry.records)):
            record = _checked(prompts, found, (which, index))
            if record is not None:
                lengths.append((_length(record), (which, index)))
    _report(prompts, found)
    if found.whole and found.held_out == found.records - found.bad:
        raise ConfigError(
            f"data.holdout is {prompts.limits.holdout:g}, which holds out all {found.held_out} records, and none is "
            "left to train on; lower it, or name a file to evaluate on (evaluation.path)"
        )
    found.longest = _prompts(prompts, found, [place for _, place in heapq.nlargest(LONGEST, lengths)])
    _report(prompts, found)
    if not found.longest:
        _refuse(prompts, found, [place for _, place in heapq.nsmallest(LONGEST, lengths)])
    if found.bad:
        prompts.notice = {"bad": found.bad, "looked_at": found.records, "first": str(found.first)}
    return found


def _checked(prompts: DataPrompts, found: Checked, place: _Place) -> Record | None:
    found.records += 1
    try:
        record = prompts.record(*place)
    except DataError as error:
        found.bad += 1
        found.first = found.first or error
        return None
    identity = prompts.identity(*place, record)
    found.held_out += prompts.holds_out(identity)
    if record.id is not None:
        other = found.ids.setdefault(record.id, place)
        if other != place:
            first, second = (prompts.sets[which].records.place(index) for which, index in (other, place))
            raise ConfigError(
                f"{first} and {second} both have the id {record.id!r} (data.id_column); ids must be unique"
            )
    return record


def _prompts(prompts: DataPrompts, found: Checked, places: Sequence[_Place]) -> list[Prompt]:
    """Render records as prompts; those that a run would draw are returned."""
    made: list[Prompt] = []
    for which, index in places:
        place = prompts.sets[which].records.place(index)
        try:
            prompt = prompts.prompt(which, index, prompts.record(which, index))
            prompts.tokens(prompt, place)
            if not made:
                prompts.renderer.check_first_token(prompt.text)
            reason = prompts.why_left_out(prompt, place)
        except DataError as error:
            found.bad += 1
            found.first = found.first or error
            continue
        if reason in (None, HELD_OUT):
            made.append(prompt)
    return made


def _report(prompts: DataPrompts, found: Checked) -> None:
    """ConfigError if a bad record was found, and such are not skipped, or if all records are bad."""
    some = found.bad < found.records
    if found.first is None or (prompts.limits.skip_bad and some):
        return
    others = f" (and {found.bad - 1} more of the {found.records} looked at)" if found.bad > 1 else ""
    # Where all are bad, a name of a column or the file is wrong, and nothing would be left.
    hint = "; set data.on_bad_record to skip to leave such records out" if some else ""
    raise ConfigError(f"{found.first}{others}{hint}") from found.first


def _refuse(prompts: DataPrompts, found: Checked, shortest: Sequence[_Place]) -> None:
    """ConfigError if the shortest prompts are left out as the longest are."""
    found.longest = _prompts(prompts, found, shortest)
    if not found.longest:
        raise ConfigError(f"none of the {found.records} records looked at has a prompt of {prompts.limits.tokens}")


def _sample(count: int) -> Iterator[int]:
    """Yield RUNS runs of RUN_RECORDS neighbours, the first and the last record among them."""
    for run in range(RUNS):
        first = (count - RUN_RECORDS) * run // (RUNS - 1)
        yield from range(first, first + RUN_RECORDS)


def _length(record: Record) -> int:
    if isinstance(record.prompt, str):
        return len(record.prompt)
    return sum(len(message["content"]) for message in record.prompt)
