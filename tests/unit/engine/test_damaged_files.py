"""Whatever is in a file that asyncrl reads, the answer is its content or one of asyncrl's own errors.

A few damages of each in plain pytest; 80,000 with `-m soak`, beside those of requests and answers over HTTP.
"""

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import save
from typer.testing import CliRunner

from asyncrl.collectors.data.jsonl import JsonlFile
from asyncrl.configs import load
from asyncrl.configs.load import parse_set
from asyncrl.engine.checkpoint import folder as checkpoint
from asyncrl.engine.checkpoint.state import read_run, read_state
from asyncrl.engine.cli import app
from asyncrl.engine.data_plane.snapshot import Snapshot
from asyncrl.engine.errors import AsyncRLError, DataError
from asyncrl.engine.events.reopen import reopen
from asyncrl.engine.events.segments import read_index
from asyncrl.engine.model.checkpoint import read_config, weight_files
from asyncrl.engine.model.folder import Note
from asyncrl.engine.model.settings import end_tokens, sampling_settings
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.work import Update
from asyncrl.engine.running.outcome import Summary
from asyncrl.engine.running.seal import sealed_code
from asyncrl.engine.testing.conformance.damages import AT_ONCE, RANDOMS, inputs
from asyncrl.engine.trace import loss_inputs
from asyncrl.engine.trace.recording import Recording
from asyncrl.engine.trace.validation import problems
from asyncrl.trainers.backends.base import Rows
from asyncrl.trainers.rank_state.index import FORMAT, Index
from asyncrl.trainers.rank_state.random_states import random_states, restore_random
from asyncrl.trainers.rank_state.saved import SavedState
from asyncrl.trainers.rank_state.shards import write_shards

TRACE = Path(__file__).parents[2] / "traces" / "schema-1.jsonl"


@dataclass(frozen=True)
class Reader:
    """The name of a file, what makes its right content in a folder (with `lines`, of JSON), and what reads it.

    `at_once` damaged forms of it are one example of hypothesis: fewer of what takes long to read.
    """

    name: str
    whole: Callable[[Path], bytes]
    read: Callable[[Path], Any]
    lines: bool = False
    at_once: int = AT_ONCE


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


def _manifest(folder: Path) -> bytes:
    names = {"state.json": b"{}", "run.json": b"{}", "trainer/rank-00000.json": b"{}"}
    (folder / "trainer").mkdir()
    for name, content in names.items():
        (folder / name).write_bytes(content)
    files = {name: {"bytes": 2, "sha256": hashlib.sha256(content).hexdigest()} for name, content in names.items()}
    return json.dumps({"format": 1, "version": 1, "after": 5, "files": files}).encode()


def _groups(folder: Path) -> bytes:
    group = GroupMeta(("v1_p0_g0",), {"group": 0, "version": 1, "reward": [0.5]})
    Snapshot([group], {"tokens": {"v1_p0_g0": torch.tensor([1, 2])}, "text": {"v1_p0_g0": "a"}}).write(folder)
    return (folder / "groups.json").read_bytes()


def _columns(folder: Path) -> bytes:
    _groups(folder)
    return (folder / "columns.safetensors").read_bytes()


def _model(_: Path) -> bytes:
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    return json.dumps({"model_type": "llama", "num_hidden_layers": 1, "eos_token_id": [1, 2], **sizes}).encode()


def _weight_map(folder: Path) -> bytes:
    (folder / "m.safetensors").write_bytes(WEIGHTS)
    return b'{"metadata": {"total_size": 20}, "weight_map": {"a": "m.safetensors", "b": "m.safetensors"}}'


def _read_settings(path: Path) -> None:
    end_tokens(str(path.parent))
    sampling_settings(str(path.parent))


def _read_prompts(path: Path) -> None:
    file = JsonlFile(path)
    for index in range(len(file)):
        with suppress(DataError):
            file.read(index)


STATE = (
    b'{"core": {"version": 5, "groups": [{"grant": {"group": 3, "prompt": {"id": "1", "text": "1>", "answer": "1", '
    b'"source": "", "fields": {"level": [1, null]}}, "size": 2, "seed": 0, "retry_of": 1}, "place": "claimed", '
    b'"keys": ["v5_p3_g0"], "tags": {"reward": [0.5, 1.0]}}], "out": [3], "unpublished": {"5": [1, 2]}, "front_end": '
    b'{"attempts": 5, "batch": null, "surplus": []}, "statistics": {}, "filters": {"0:a": {"seen": 1}}, '
    b'"filter_stats": {}}, "prompts": {"next": 12, "source": {"drawn": 6}, "again": []}, "retirement": {"failures": '
    b'[[1, 2]], "retired": [], "cause": ""}, "next_group": 4, "turns": {"collector0": 4}}'
)
RUN = b'{"config": {"run": {"seed": 1}}, "config_digest": "ab", "software": {"torch": "2"}}'
SEAL = b'{"code": ["a.py:B"], "seal": "00"}'
GENERATION = b'{"eos_token_id": [1, 2], "temperature": 0.6, "top_k": 20}'
PROMPTS = b'{"id": 1, "prompt": "a", "answer": "b"}\n{"id": 2, "prompt": [{"role": "user", "content": "c"}]}\n'
YAML = b"rollout: {max_staleness: 2}\nfilters:\n- name: length\n"
NOTE = b'{"format": 1, "version": 1, "step": 1, "mean_reward": 0.5, "reward_window": 10, "config": "ab"}'
SEGMENTS = b'{"format": 1, "segments": [{"file": "events-000001.jsonl", "first": 1, "last": 5, "bytes": 30}]}'
SUMMARY = b'{"exit": {"code": 0, "reason": "limit"}, "trained_age_histogram": {"0": 1}, "steps": 1}'
WEIGHTS = save({"a": torch.ones(3), "b": torch.ones(2)})
_FEW = 3
READERS = [
    Reader("manifest.json", _manifest, lambda path: checkpoint.check(path.parent), lines=True),
    Reader("state.json", lambda _: STATE, lambda path: read_state(checkpoint.read_json(path)), lines=True),
    Reader("run.json", lambda _: RUN, lambda path: read_run(checkpoint.read_json(path)), lines=True),
    Reader("groups.json", _groups, lambda path: Snapshot.read(path.parent), lines=True),
    Reader("columns.safetensors", _columns, lambda path: Snapshot.read(path.parent)),
    Reader("seal.json", lambda _: SEAL, lambda path: sealed_code(path.parent), lines=True),
    Reader("events-000001.jsonl.gz", lambda _: gzip.compress(TRACE.read_bytes()), lambda path: list(problems(path))),
    Reader("config.json", _model, lambda path: read_config(str(path.parent)), lines=True),
    Reader("generation_config.json", lambda _: GENERATION, _read_settings, lines=True),
    Reader("model.safetensors.index.json", _weight_map, lambda path: weight_files(str(path.parent)), lines=True),
    Reader("prompts.jsonl", lambda _: PROMPTS, _read_prompts, lines=True),
    Reader("a.yaml", lambda _: YAML, lambda path: load(str(path)), at_once=_FEW),
    Reader("set", lambda _: b"run.seed=2", lambda path: parse_set(path.read_text("utf-8", errors="replace"))),
    Reader("log.jsonl", lambda _: TRACE.read_bytes(), lambda path: list(problems(path)), lines=True),
    Reader("recording.jsonl", lambda _: TRACE.read_bytes(), Recording.read, lines=True),
    Reader("plan.jsonl", lambda _: TRACE.read_bytes(), _plan_show, lines=True, at_once=_FEW),
    Reader("events.jsonl", lambda _: TRACE.read_bytes(), reopen, lines=True),
    Reader("events.index.json", lambda _: SEGMENTS, lambda path: read_index(path.parent), lines=True),
    Reader("asyncrl.json", lambda _: NOTE, lambda path: Note.read(path.parent), lines=True),
    Reader("summary.json", lambda _: SUMMARY, lambda path: Summary.read(path.parent), lines=True),
    Reader("loss", _loss_inputs, loss_inputs.load),
    Reader("m.safetensors", lambda _: WEIGHTS, lambda path: weight_files(str(path.parent))),
    Reader("state.index", _state_index, _read_state, lines=True, at_once=_FEW),
    Reader("random.index", _state_index, _read_random, lines=True, at_once=_FEW),
    Reader("rank-00000-1.safetensors", _state_file, _read_state),
]


def _check(reader: Reader, random: Random, folder: Path) -> None:
    path = folder / reader.name
    whole = reader.whole(folder)
    for content in islice(inputs(random, whole, lines=reader.lines), reader.at_once):
        path.write_bytes(content)
        with suppress(AsyncRLError):
            reader.read(path)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
@given(random=RANDOMS)
@settings(max_examples=1, deadline=None)
def test_damaged_files_are_read_or_refused(reader: Reader, random: Random, tmp_path_factory: Any) -> None:
    _check(reader, random, tmp_path_factory.mktemp("damaged"))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
@given(random=RANDOMS)
@settings(max_examples=187, deadline=None)
def test_many_damaged_files_are_read_or_refused(reader: Reader, random: Random, tmp_path_factory: Any) -> None:
    _check(reader, random, tmp_path_factory.mktemp("damaged"))


def test_a_seal_that_is_no_text_seals_nothing(tmp_path: Path) -> None:
    (tmp_path / "seal.json").write_bytes(b'{"code": ["a\xff"], "seal": "00"}')
    assert sealed_code(tmp_path) == ()


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
