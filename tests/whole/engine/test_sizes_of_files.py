"""A file, or an answer, that is larger than any of its kind is refused: in a moment, by name, and in little memory.

Most files are sparse: they claim a tebibyte and take a page.
"""

import gzip
import json
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest
import torch
from safetensors.torch import save
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.collectors.data.jsonl import JsonlFile
from asyncrl.collectors.engines.http.client import LONGEST_ANSWER, Client, Refused
from asyncrl.collectors.engines.http.preflight import shape_of
from asyncrl.collectors.environments.agents.chat import Drawn
from asyncrl.collectors.environments.agents.proxy import LONGEST_BODY, Proxy
from asyncrl.configs import load
from asyncrl.configs.load import parse_set
from asyncrl.engine.checkpoint import folder as checkpoint
from asyncrl.engine.data_plane.snapshot import Snapshot
from asyncrl.engine.errors import AsyncRLError, CheckpointBroken, ConfigError, TraceError
from asyncrl.engine.events.log import read_events
from asyncrl.engine.events.segments import LARGEST_SEGMENT, read_index, read_lines
from asyncrl.engine.model.checkpoint import check_weights, read_config, weight_files
from asyncrl.engine.model.folder import Note
from asyncrl.engine.model.settings import end_tokens
from asyncrl.engine.model.tokenizer import HuggingFaceTokenizer
from asyncrl.engine.running.outcome import Summary
from asyncrl.engine.trace import loss_inputs
from asyncrl.trainers.rank_state.boxes import what_is_wrong
from asyncrl.trainers.rank_state.index import Index, Part
from asyncrl.trainers.rank_state.shards import ShardFile

HUGE = 1 << 40
MOMENT_S = 30.0
"""Far more than is needed (a second at most, where 64 MiB of a line are looked at), far less than a tebibyte takes."""
MEMORY = 300 << 20


@contextmanager
def little() -> Iterator[None]:
    """Fail if the block takes long, or much memory."""
    tracemalloc.start()
    began = time.monotonic()
    try:
        yield
        took, (_, peak) = time.monotonic() - began, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert took < MOMENT_S
    assert peak < MEMORY


def sparse(path: Path, begin: bytes = b"") -> Path:
    with path.open("wb") as file:
        file.write(begin)
        file.truncate(HUGE)
    return path


@dataclass(frozen=True)
class Large:
    """A sparse file, what reads it, and words of its refusal."""

    name: str
    read: Callable[[Path], Any]
    words: str
    begin: bytes = b""


LARGE = [
    Large("a.yaml", lambda path: load(str(path)), "has 1,099,511,627,776 bytes; such a file has 262,144 at most"),
    Large("log.jsonl", lambda path: list(read_events(path)), "log.jsonl, line 1: it has more than 67,108,864 bytes"),
    Large("events.index.json", lambda path: read_index(path.parent), "16,777,216 at most"),
    Large("manifest.json", lambda path: checkpoint.check(path.parent), "268,435,456 at most"),
    Large("state.json", checkpoint.read_json, "268,435,456 at most"),
    Large("groups.json", lambda path: Snapshot.read(path.parent), "268,435,456 at most"),
    Large("rank-00000.json", Index.read, "268,435,456 at most"),
    Large("rank-00000-1.safetensors", ShardFile, "header alone needs", (1 << 39).to_bytes(8, "little")),
    Large("m.safetensors", lambda path: weight_files(str(path.parent)), "is damaged", (1 << 39).to_bytes(8, "little")),
    Large("loss", loss_inputs.load, "cannot be read as loss inputs", (1 << 39).to_bytes(8, "little")),
    Large("summary.json", lambda path: Summary.read(path.parent), "16,777,216 at most"),
    Large("asyncrl.json", lambda path: Note.read(path.parent), "268,435,456 at most"),
    Large("config.json", lambda path: shape_of(path.parent), "268,435,456 at most"),
    Large("config.json", lambda path: read_config(str(path.parent)), "268,435,456 at most"),
    Large("generation_config.json", lambda path: end_tokens(str(path.parent)), "268,435,456 at most"),
    Large("tokenizer.json", lambda path: HuggingFaceTokenizer(str(path.parent)), "268,435,456 at most"),
    Large("model.safetensors.index.json", lambda path: weight_files(str(path.parent)), "268,435,456 at most"),
    Large("prompts.jsonl", JsonlFile, "line 1 has more than 67,108,864 bytes"),
]


@pytest.mark.parametrize("large", LARGE, ids=[f"{large.name}-{at}" for at, large in enumerate(LARGE)])
def test_a_file_of_a_tebibyte_is_refused(large: Large, tmp_path: Path) -> None:
    path = sparse(tmp_path / large.name, large.begin)
    with little(), pytest.raises(AsyncRLError, match=large.name) as refused:
        large.read(path)
    assert large.words in str(refused.value)


def test_what_is_not_a_regular_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.symlink_to("/dev/zero")
    with little(), pytest.raises(ConfigError, match="is not a regular file"):
        shape_of(tmp_path)


def header(entry: Any) -> bytes:
    """Return a safetensors file of one tensor, of which the header says this."""
    text = json.dumps({"a": entry}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(4)


@pytest.mark.parametrize("length", [1 << 60, (1 << 64) - 1, 200_000_000])
@pytest.mark.parametrize("read", [ShardFile, lambda path: weight_files(str(path.parent)), loss_inputs.load])
def test_a_header_of_claimed_length_is_refused(read: Callable[[Path], Any], length: int, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}")
    with little(), pytest.raises(AsyncRLError, match=r"a\.safetensors"):
        read(path)


@pytest.mark.parametrize("shape", [[1 << 60, 1 << 60], [10**9] * 1_000_000, [0, 1 << 62], [-1, -4]])
def test_a_shape_of_a_huge_product_is_refused(shape: list[int], tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(header({"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}))
    with little(), pytest.raises(CheckpointBroken, match="bytes that it cannot have"):
        ShardFile(path)


def test_an_index_whose_parts_are_too_many_to_compare_is_refused() -> None:
    columns = [Part("a.safetensors", (0, at), (9, 1), 0) for at in range(100_000)]
    with little():
        assert what_is_wrong((9, 100_000), columns) == "it has 2 dimensions and 100,000 parts"
        assert "dimensions" in str(what_is_wrong((10**9,) * 1_000_000, ()))


def test_what_could_not_be_read_again_is_not_put_into_a_checkpoint(tmp_path: Path) -> None:
    new = checkpoint.begin(tmp_path / "v000001")
    sparse(new / checkpoint.STATE)
    with little(), pytest.raises(CheckpointBroken, match=r"state\.json has 1,099,511,627,776 bytes"):
        checkpoint.finish(new, tmp_path / "v000001", version=1, after=1)


def test_aliases_that_multiply_are_counted_wherever_they_stand(tmp_path: Path) -> None:
    lines = ["a: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]", *(f"a{n}: &a{n} [{f'*a{n - 1}, ' * 10}]" for n in range(1, 12))]
    path = tmp_path / "a.yaml"
    path.write_text("\n".join(lines), encoding="utf-8")
    with little(), pytest.raises(ConfigError, match=r"a\.yaml is not YAML: line 4, .*: more than 10,000 values"):
        load(str(path))
    with little(), pytest.raises(ConfigError, match="more than 10,000 values"):
        parse_set("filters=[" + "1," * 10_001 + "]")


def test_merges_of_maps_that_multiply_are_counted_too() -> None:
    keys = "&a0 {a: 1, b: 2}"
    for n in range(1, 12):
        keys = f"&a{n} {{<<: [{keys}{f', *a{n - 1}' * 9}]}}"
    with little(), pytest.raises(ConfigError, match="more than 10,000 values"):
        parse_set(f"task.options={keys}")


def test_a_value_is_told_shortened() -> None:
    with pytest.raises(ConfigError) as refused:
        load(overrides=[parse_set(f"run.seed={'x' * 100_000}")])
    assert len(str(refused.value)) < 600
    assert "… (100,002 characters)" in str(refused.value)


def bomb(line: bytes, size: int) -> bytes:
    """Return so many bytes of lines, compressed as one of a thousandth."""
    member = gzip.compress(line * ((8 << 20) // len(line)))
    return member * (size // (8 << 20) + 1)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (bytes(1 << 20), "it has more than 67,108,864 bytes"),
        (bytes((1 << 20) - 1) + b"\n", f"more than {LARGEST_SEGMENT:,}"),
    ],
    ids=["one line", "many lines"],
)
def test_a_segment_that_holds_a_thousand_times_its_size_is_refused(line: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "events-000001.jsonl.gz"
    path.write_bytes(bomb(line, LARGEST_SEGMENT + 1))
    assert path.stat().st_size < 1 << 20
    with little(), pytest.raises(TraceError, match=words):
        for _ in read_lines(path):
            pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, num_key_value_heads=2, **sizes)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("vocab_size", 1 << 26, "describes 1,073,742,296 weights; its files have"),
        ("hidden_size", 1 << 40, "weights; its files have"),
        ("vocab_size", 1 << 70, "describes no model"),
        ("num_hidden_layers", 10**9, "has num_hidden_layers 1,000,000,000; 10,000 is the most"),
        ("num_attention_heads", 0, "transformers cannot read"),
        ("vocab_size", "8", "transformers cannot read"),
    ],
)
def test_a_model_folder_that_describes_more_than_it_holds_is_refused(
    name: str, value: Any, words: str, model: Path
) -> None:
    config = model / "config.json"
    whole = config.read_text(encoding="utf-8")
    config.write_text(json.dumps({**json.loads(whole), name: value}), encoding="utf-8")
    try:
        with little(), pytest.raises(ConfigError, match=words):
            check_weights(str(model))
    finally:
        config.write_text(whole, encoding="utf-8")


@pytest.mark.parametrize(
    "content",
    ["[" * 200_000, '{"weight_map": []}', '{"weight_map": {"a": [1]}}', '{"weight_map": {"a": "' + "b" * 256 + '"}}'],
)
def test_an_index_of_weights_that_is_none_is_refused(content: str, model: Path) -> None:
    index = model / "model.safetensors.index.json"
    index.write_text(content, encoding="utf-8")
    try:
        with pytest.raises(ConfigError, match=index.name):
            weight_files(str(model))
    finally:
        index.unlink()


@pytest.mark.parametrize("digits", ["9" * 5000, "²", "99"])
def test_a_format_that_is_no_number_of_today_is_refused(digits: str, tmp_path: Path) -> None:
    path = tmp_path / "loss"
    path.write_bytes(save({"a": torch.ones(1)}, {"format": digits, "inputs": "{}"}))
    with pytest.raises(TraceError, match="loss"):
        loss_inputs.load(path)


class Endless(BaseHTTPRequestHandler):
    """Answers without an end: with zeros, with an event of zeros, or with zeros compressed."""

    def do_POST(self) -> None:
        self.send_response(404 if self.path == "/refusal" else 200)
        packed = self.path == "/packed"
        if packed:
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        packer = zlib.compressobj(wbits=31)
        try:
            self.wfile.write(b"" if packed else b"data: ")
            while True:
                self.wfile.write(packer.compress(bytes(1 << 20)) if packed else bytes(1 << 20))
        except OSError:
            pass

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("path", ["/answer", "/packed", "/refusal", "/stream"])
def test_an_answer_without_an_end_is_refused(path: str) -> None:
    async def ask(url: str) -> None:
        client = Client(url, timeout_s=60.0, tries=1)
        try:
            if path == "/stream":
                async for _ in client.stream(path, {}):
                    pass
            else:
                await client.post(path, {})
        finally:
            await client.close()

    with HTTPServer(("127.0.0.1", 0), Endless) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        with little(), pytest.raises(Refused, match=f"more than {LONGEST_ANSWER:,} bytes"):
            anyio.run(ask, f"http://127.0.0.1:{server.server_port}")
        server.shutdown()


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_a_request_longer_than_the_limit_is_refused_before_its_end(packed: bool) -> None:
    """A request that is packed counts by what it holds: a hundred kilobytes of it are a hundred megabytes."""

    async def ask() -> tuple[int, str]:
        proxy = Proxy(Drawn(1.0, ()))
        body = b'"' + bytes(6 * LONGEST_BODY) + b'"'
        headers = {"Content-Encoding": "gzip"} if packed else {}
        async with anyio.create_task_group() as tasks, aiohttp.ClientSession() as http:
            tasks.start_soon(proxy.run)
            async with proxy.admit(object()) as (url, key):  # type: ignore[arg-type]
                headers["Authorization"] = f"Bearer {key}"
                content = gzip.compress(body, 1) if packed else body
                async with http.post(f"{url}/chat/completions", data=content, headers=headers) as answer:
                    found = answer.status, (await answer.text())[:200]
            tasks.cancel_scope.cancel()
        return found

    status, text = anyio.run(ask)
    assert status in ((400, 413) if packed else (413,)), text
