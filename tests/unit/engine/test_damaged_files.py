"""Whatever is in a file that asyncrl reads, the answer is its content or one of asyncrl's own errors.

A few damages of each in plain pytest; thousands with `-m soak`.
"""

import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from typer.testing import CliRunner

from asyncrl.configs import load
from asyncrl.configs.load import parse_set
from asyncrl.engine.cli import app
from asyncrl.engine.errors import AsyncRLError
from asyncrl.engine.events.reopen import reopen
from asyncrl.engine.events.segments import read_index
from asyncrl.engine.model.checkpoint import weight_files
from asyncrl.engine.model.folder import Note
from asyncrl.engine.records.work import Update
from asyncrl.engine.running.outcome import Summary
from asyncrl.engine.trace import loss_inputs
from asyncrl.engine.trace.recording import Recording
from asyncrl.engine.trace.validation import problems
from asyncrl.trainers.backends.base import Rows
from asyncrl.trainers.rank_state.index import FORMAT, Index
from asyncrl.trainers.rank_state.random_states import random_states, restore_random
from asyncrl.trainers.rank_state.saved import SavedState
from asyncrl.trainers.rank_state.shards import write_shards

TRACE = Path(__file__).parents[2] / "traces" / "schema-1.jsonl"
ODD = (
    b"null",
    b"-1",
    b"[]",
    b"{}",
    b'""',
    b"1e999",
    b"NaN",
    b"9" * 25,
    b"1.5",
    b"true",
    b"\xff\xfe",
    b"\x00",
    b"[" * 2000,
)
VALUES: tuple[Any, ...] = (0, -1, 7, 2**40, 10**25, 1.5, "", "x", None, True, [], {}, [1], {"a": 1})


@dataclass(frozen=True)
class Reader:
    """The name of a file, what makes its right content in a folder (with `lines`, of JSON), and what reads it."""

    name: str
    whole: Callable[[Path], bytes]
    read: Callable[[Path], Any]
    lines: bool = False


def _state_index(folder: Path) -> bytes:
    """Write a rank's state; return its index without the checksum."""
    entries = write_shards({"a": torch.arange(6.0).reshape(2, 3)}, folder, stem="rank-00000")
    Index(FORMAT, 0, 1, 3, entries, {"base": 1}, random_states(torch.device("cpu"))).write(folder)
    return json.dumps(json.loads((folder / "rank-00000.json").read_bytes())["index"]).encode()


def _state_file(folder: Path) -> bytes:
    _state_index(folder)
    return (folder / "rank-00000-1.safetensors").read_bytes()


def _read_state(path: Path) -> None:
    """Read a state; the index has the right checksum, so that its content counts."""
    if path.suffix == ".index":
        try:
            body = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            return
        checksum = zlib.crc32(json.dumps(body, sort_keys=True).encode())
        content = json.dumps({"crc32": checksum, "index": body})
        (path.parent / "rank-00000.json").write_text(content, encoding="utf-8")
    saved = SavedState(path.parent)
    target = torch.zeros(2, 3)
    saved.check({"a": target}, {})
    saved.read_into("a", target)


def _read_random(path: Path) -> None:
    with suppress(AsyncRLError):
        _read_state(path)
    states = Index.read(path.parent / "rank-00000.json").random
    before = random_states(torch.device("cpu"))
    try:
        restore_random(states, torch.device("cpu"))
    finally:
        restore_random(before, torch.device("cpu"))


def _plan_show(path: Path) -> None:
    result = CliRunner().invoke(app, ["plan", "show", str(path)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception


def _loss_inputs(folder: Path) -> bytes:
    tokens = [torch.tensor([1, 2, 3]), torch.tensor([1, 2])]
    logprobs = [torch.tensor([-1.0, -2.0]), torch.tensor([-1.0])]
    rows = [Rows(tokens, logprobs, [1, 1], [0.5, 0.2], [0, 0], filler) for filler in (False, True)]
    loss_inputs.save(loss_inputs.LossInputs(1, [rows], (Update(2, 3),)), folder / "loss")
    return (folder / "loss").read_bytes()


YAML = b"rollout: {max_staleness: 2}\nfilters:\n- name: length\n"
NOTE = b'{"format": 1, "version": 1, "step": 1, "mean_reward": 0.5, "reward_window": 10, "config": "ab"}'
SEGMENTS = b'{"format": 1, "segments": [{"file": "events-000001.jsonl", "first": 1, "last": 5, "bytes": 30}]}'
SUMMARY = b'{"exit": {"code": 0, "reason": "limit"}, "trained_age_histogram": {"0": 1}, "steps": 1}'
WEIGHTS = save({"a": torch.ones(3), "b": torch.ones(2)})
READERS = [
    Reader("a.yaml", lambda _: YAML, lambda path: load(str(path))),
    Reader("set", lambda _: b"run.seed=2", lambda path: parse_set(path.read_text("utf-8", errors="replace"))),
    Reader("log.jsonl", lambda _: TRACE.read_bytes(), lambda path: list(problems(path)), lines=True),
    Reader("recording.jsonl", lambda _: TRACE.read_bytes(), Recording.read, lines=True),
    Reader("plan.jsonl", lambda _: TRACE.read_bytes(), _plan_show, lines=True),
    Reader("events.jsonl", lambda _: TRACE.read_bytes(), reopen, lines=True),
    Reader("events.index.json", lambda _: SEGMENTS, lambda path: read_index(path.parent), lines=True),
    Reader("asyncrl.json", lambda _: NOTE, lambda path: Note.read(path.parent), lines=True),
    Reader("summary.json", lambda _: SUMMARY, lambda path: Summary.read(path.parent), lines=True),
    Reader("loss", _loss_inputs, loss_inputs.load),
    Reader("m.safetensors", lambda _: WEIGHTS, lambda path: weight_files(str(path.parent))),
    Reader("state.index", _state_index, _read_state, lines=True),
    Reader("random.index", _state_index, _read_random, lines=True),
    Reader("rank-00000-1.safetensors", _state_file, _read_state),
]


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Change bytes: flip a bit, cut, leave out, insert odd values, take parts twice."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.integers(1, 30)))
        match draw(st.integers(0, 4)):
            case 0 if data:
                data[min(at, len(data) - 1)] ^= 1 << draw(st.integers(0, 7))
            case 1:
                del data[at:]
            case 2:
                del data[at:end]
            case 3:
                data[at:end] = draw(st.sampled_from(ODD))
            case _:
                data[at:at] = data[at:end]
    return bytes(data)


@st.composite
def misleading(draw: st.DrawFn, whole: bytes) -> bytes:
    """Change values in lines of JSON, so that they can still be read."""
    lines = whole.splitlines()
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.integers(0, len(lines) - 1))
        content = json.loads(lines[at])
        place, key = draw(st.sampled_from(list(_places(content))))
        if draw(st.booleans()):
            place[key] = draw(st.sampled_from(VALUES))
        else:
            del place[key]
        lines[at] = json.dumps(content).encode()
    return b"\n".join(lines) + b"\n"


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what a JSON document consists of: a map or list, and a key or index in it."""
    keys = content.keys() if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
    for key in keys:
        yield content, key
        yield from _places(content[key])


def _check(reader: Reader, data: st.DataObject, folder: Path) -> None:
    path = folder / reader.name
    whole = reader.whole(folder)
    strategies = [damaged(whole), *([misleading(whole)] if reader.lines else [])]
    path.write_bytes(data.draw(st.one_of(strategies)))
    with suppress(AsyncRLError):
        reader.read(path)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
@given(data=st.data())
@settings(max_examples=6, deadline=None)
def test_a_damaged_file_is_read_or_refused(reader: Reader, data: st.DataObject, tmp_path_factory: Any) -> None:
    _check(reader, data, tmp_path_factory.mktemp("damaged"))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
@given(data=st.data())
@settings(max_examples=1000, deadline=None)
def test_many_damaged_files_are_read_or_refused(reader: Reader, data: st.DataObject, tmp_path_factory: Any) -> None:
    _check(reader, data, tmp_path_factory.mktemp("damaged"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("summary.json", b"{}"),
        ("summary.json", b'{"exit": true}'),
        ("summary.json", b"\xff"),
        ("m.safetensors", (50).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[],"data_offsets":[]}}'),
        ("loss", save({"a": torch.ones(1)}, {"format": "1", "inputs": "{"})),
        ("loss", save({"a": torch.ones(1)}, {"format": "1", "inputs": "{}"})),
    ],
    # safetensors writes the entries of its header in any order, and two workers must name a test alike.
    ids=["empty", "exit", "no text", "short header", "inputs cut", "inputs empty"],
)
def test_damages_that_once_gave_a_traceback_are_errors_with_the_files_name(
    name: str, content: bytes, tmp_path: Path
) -> None:
    (reader,) = (one for one in READERS if one.name == name)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(AsyncRLError, match=name):
        reader.read(tmp_path / name)
