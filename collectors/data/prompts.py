"""Prompts of data sets, drawn one by one.

Invariant: a record is read when its turn comes, and a turn that is left out counts as drawn.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import structlog

from asyncrl.collectors.data.columns import Columns, Record
from asyncrl.collectors.data.mixture import Mixture
from asyncrl.collectors.data.records import Records
from asyncrl.collectors.data.renderer import Renderer
from asyncrl.configs import RunConfig
from asyncrl.engine.errors import DataError
from asyncrl.engine.records import Prompt, PromptStream

log = structlog.get_logger()

BAD, TOO_LONG, TOO_SHORT, HELD_OUT = "bad_record", "too_long", "too_short", "held_out"


@dataclass(frozen=True, slots=True)
class NamedSet:
    """One set of a mixture; `weight` is None for all of its sets, or for none."""

    name: str
    records: Records
    weight: float | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Which records are drawn: lengths in tokens, and the share that is held out."""

    min_tokens: int
    max_tokens: int | None
    holdout: float
    skip_bad: bool

    @classmethod
    def of(cls, config: RunConfig) -> "Limits":
        """Return the limits of a configuration."""
        data = config.data
        return cls(data.min_prompt_tokens, data.max_prompt_tokens, data.holdout, data.on_bad_record == "skip")

    @property
    def tokens(self) -> str:
        """The lengths of prompts that are drawn, for errors, with the options that set them."""
        if self.max_tokens is None:
            return f"at least {self.min_tokens} tokens (data.min_prompt_tokens)"
        return f"{self.min_tokens} to {self.max_tokens} tokens (data.min_prompt_tokens, data.max_prompt_tokens)"


class DataPrompts(PromptStream):
    """A stream over `sets` for `epochs` passes, without end for None; one epoch is as many draws as there are records.

    DataError for a record that cannot be used, unless such are skipped, and once two epochs in a row bring no prompt.
    """

    def __init__(
        self,
        sets: Sequence[NamedSet],
        columns: Columns,
        renderer: Renderer,
        limits: Limits,
        *,
        seed: int,
        epochs: int | None,
    ) -> None:
        self.sets = sets
        self.columns = columns
        self.renderer = renderer
        self.limits = limits
        self._epochs = epochs
        # Nothing is printed before a run has its log, so it is told with the first draw.
        self.notice: Mapping[str, Any] = {}
        """What the check before the start has to say of bad records."""
        self._skipped: Counter[str] = Counter()
        sizes = {entry.name: len(entry.records) for entry in sets}
        weights = [entry.weight for entry in sets if entry.weight is not None]
        self._mixture = Mixture(sizes, weights or None, seed=seed)
        self._count = sum(sizes.values())

    @property
    def prompts(self) -> int:
        return self._count

    @property
    def skipped(self) -> Mapping[str, int]:
        return self._skipped

    def __next__(self) -> Prompt:
        if self.notice:
            log.warning("bad records are left out", **self.notice)
            self.notice = {}
        for _ in range(2 * self._count):
            if self._epochs is not None and self._mixture.position >= self._epochs * self._count:
                raise StopIteration
            prompt = self._drawn(*self._mixture.draw())
            if prompt is not None:
                return prompt
        raise DataError(f"no prompt came of {2 * self._count} records in a row; left out so far: {dict(self._skipped)}")

    def state(self) -> dict[str, Any]:
        return {"drawn": self._mixture.state(), "skipped": dict(self._skipped)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._mixture.restore(state["drawn"])
        self._skipped = Counter(state.get("skipped", {}))

    def record(self, which: int, index: int) -> Record:
        """Read and check a record; DataError, with its place and field, if it cannot be used."""
        records = self.sets[which].records
        record = self.columns.check(records.read(index), records.place(index))
        if not isinstance(record.prompt, str) and not self.renderer.chat:
            raise DataError(f"{records.place(index)}, field {self.columns.prompt!r}: {self.renderer.refusal}")
        return record

    def prompt(self, which: int, index: int, record: Record) -> Prompt:
        """Make the prompt of a record; DataError if its text cannot be made."""
        entry = self.sets[which]
        try:
            text = self.renderer.text(record.prompt)
        except ValueError as error:
            place = entry.records.place(index)
            raise DataError(f"{place}, field {self.columns.prompt!r}, cannot be used: {error}") from error
        return Prompt(
            self.identity(which, index, record), text, record.answer, record.dataset or entry.name, record.fields
        )

    def identity(self, which: int, index: int, record: Record) -> int | str:
        """Return the id of a record's prompt: its own, or the set's name and the record's number."""
        entry = self.sets[which]
        return f"{entry.name}:{entry.records.number(index)}" if record.id is None else record.id

    def holds_out(self, identity: int | str) -> bool:
        """Say whether training never draws the prompt of this id."""
        return share_of(identity) < self.limits.holdout

    def why_left_out(self, prompt: Prompt, place: str) -> str | None:
        """Return the reason for which a prompt is not drawn; None if it is."""
        limits = self.limits
        if self.holds_out(prompt.id):
            return HELD_OUT
        if limits.max_tokens is None and limits.min_tokens <= 1:
            return None
        tokens = self.tokens(prompt, place)
        if tokens < limits.min_tokens:
            return TOO_SHORT
        return TOO_LONG if limits.max_tokens is not None and tokens > limits.max_tokens else None

    def tokens(self, prompt: Prompt, place: str) -> int:
        """Count the tokens of a prompt; DataError, with its place, if it has one that the tokenizer does not know."""
        try:
            return self.renderer.tokens(prompt.text)
        except ValueError as error:
            raise DataError(f"{place}, field {self.columns.prompt!r}, cannot be used: {error}") from error

    def _drawn(self, which: int, index: int) -> Prompt | None:
        """Return a prompt whose turn it is; None if it is left out."""
        place = self.sets[which].records.place(index)
        try:
            prompt = self.prompt(which, index, self.record(which, index))
            reason = self.why_left_out(prompt, place)
        except DataError as error:
            if not self.limits.skip_bad:
                raise
            reason = BAD
            self._tell(reason, str(error))
        else:
            if reason is None:
                return prompt
            self._tell(reason, place)
        return None

    def _tell(self, reason: str, what: str) -> None:
        """Count a record that is left out, and log the first, the tenth, the hundredth … of each reason."""
        self._skipped[reason] += 1
        times = self._skipped[reason]
        if reason != HELD_OUT and times == 10 ** (len(str(times)) - 1):
            log.warning("a record was left out", reason=reason, record=what, times=times)


def share_of(identity: int | str) -> float:
    """Return a number from 0 to 1 that depends on an id alone."""
    kind = "i" if isinstance(identity, int) else "s"
    digest = blake2b(f"{kind}{identity}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64
