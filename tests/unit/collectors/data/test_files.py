"""Records of files: found by line, decoded when they are read, and named when they are bad."""

import os
from pathlib import Path
from typing import Any

import pytest

from asyncrl.collectors.data.jsonl import JsonlFile
from asyncrl.collectors.data.open import open_records
from asyncrl.engine.errors import ConfigError, DataError


def jsonl(tmp_path: Path, content: bytes) -> JsonlFile:
    path = tmp_path / "set.jsonl"
    path.write_bytes(content)
    return JsonlFile(path)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b'{"a":1}\n{"a":2}\n', [(1, {"a": 1}), (2, {"a": 2})]),
        (b'{"a":1}\r\n{"a":2}', [(1, {"a": 1}), (2, {"a": 2})]),
        (b'\n\r\n{"a":1}\n\n\n{"a":2}\n\n', [(3, {"a": 1}), (6, {"a": 2})]),
        (b"\xef\xbb\xbf{}\n7", [(1, {}), (2, 7)]),
        ('{"a":"\u00e9\u2028\\n"}\n{}'.encode(), [(1, {"a": "\u00e9\u2028\n"}), (2, {})]),
    ],
)
def test_each_line_with_content_is_a_record(tmp_path: Path, content: bytes, found: list[tuple[int, Any]]) -> None:
    records = jsonl(tmp_path, content)
    assert [(records.number(i), records.read(i)) for i in range(len(records))] == found


def test_lines_are_found_across_the_pieces_in_which_a_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.collectors.data.jsonl._CHUNK_BYTES", 7)
    records = jsonl(tmp_path, b"".join(b'{"n":%d}\n' % n for n in range(50)))
    assert [records.read(i)["n"] for i in range(len(records))] == list(range(50))


@pytest.mark.parametrize("line", [b'{"a": NaN}', b"{'a': 1}", b'{"a": "\xff"}', b"{", b"[" * 5000, b"   "])
def test_a_line_that_is_not_json_is_named(tmp_path: Path, line: bytes) -> None:
    records = jsonl(tmp_path, b"{}\n" + line + b"\n{}\n")
    with pytest.raises(DataError, match=r"set\.jsonl, line 2 is not JSON: "):
        records.read(1)
    assert records.read(2) == {}


def test_what_is_no_data_set_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_bytes(b"\n\n")
    (tmp_path / "set.json").write_bytes(b"[]")
    for name, words in (
        ("empty.jsonl", "holds no record"),
        ("set.json", "must end in .jsonl"),
        ("none.jsonl", "No such file"),
        ("none.parquet", "No such file"),
        (".", "is a folder that datasets did not save"),
    ):
        with pytest.raises(ConfigError, match=words):
            open_records(str(tmp_path / name))
    (tmp_path / "a.jsonl").write_bytes(b"{}")
    with pytest.raises(ConfigError, match="the split 'train' was asked for; files have none"):
        open_records(str(tmp_path / "a.jsonl"), "train")


def test_parquet_is_read_by_row_group_and_its_values_are_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import date
    from decimal import Decimal

    import pyarrow as arrow
    from pyarrow import parquet

    monkeypatch.setattr("asyncrl.collectors.data.parquet.KEPT_BYTES", 1)
    rows = [{"n": n, "day": date(2020, 1, 1), "cost": Decimal("1.5"), "list": [n]} for n in range(10)]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "set.parquet", row_group_size=3)
    records = open_records(str(tmp_path / "set.parquet"))
    assert [records.read(i)["n"] for i in (9, 0, 3, 2, 8, 1)] == [9, 0, 3, 2, 8, 1]
    assert records.read(4) == {"n": 4, "day": "2020-01-01", "cost": "1.5", "list": [4]}
    assert records.place(4).endswith("set.parquet, row 5")
    (tmp_path / "bad.parquet").write_bytes(b"{}")
    with pytest.raises(ConfigError, match="cannot be read as Parquet"):
        open_records(str(tmp_path / "bad.parquet"))


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train.jsonl")
    with pytest.raises(ConfigError, match=r"train\.jsonl is a pipe or a device; .* must be a regular file"):
        open_records(str(tmp_path / "train.jsonl"))


def test_a_folder_that_datasets_saved_is_read_by_split(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}])
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(str(tmp_path / "two"))
    assert open_records(str(tmp_path / "two"), "test").read(0) == {"prompt": "b"}
    with pytest.raises(ConfigError, match=r"two has the splits train, test, and none was named; set data\.split"):
        open_records(str(tmp_path / "two"))
    assert open_records(str(tmp_path / "two" / "train")).place(1).endswith("train, row 2")


def test_a_data_set_is_found_by_name_in_the_cache_and_never_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    (tmp_path / "set.jsonl").write_text('{"prompt": "a"}', encoding="utf-8")
    datasets.load_dataset("json", "one", data_files=str(tmp_path / "set.jsonl"), cache_dir=str(tmp_path / "cache"))
    (cached,) = (tmp_path / "cache" / "json").glob("one*")
    (tmp_path / "cache" / "json").rename(tmp_path / "cache" / "owner___name")
    cached = tmp_path / "cache" / "owner___name" / cached.name
    for file in cached.rglob("json-*.arrow"):
        file.rename(file.with_name(file.name.replace("json-", "name-", 1)))
    for file in cached.rglob("dataset_info.json"):
        file.write_text(file.read_text(encoding="utf-8").replace('"json"', '"name"'), encoding="utf-8")
    cached.rename(cached.with_name("one"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("it went to the network"))
    for name in ("owner/name", "owner/name:one"):
        records = open_records(name)
        assert (len(records), records.read(0)) == (1, {"prompt": "a"})
    with pytest.raises(ConfigError, match=r"'no-such/set' does not exist: .* from its cache.*data\.fetch true"):
        open_records("no-such/set")
    # What looks like a file is more often a file that is not there than a data set.
    with pytest.raises(ConfigError, match=r"^'train\.txt' does not exist: there is no such file or folder here"):
        open_records("train.txt")
