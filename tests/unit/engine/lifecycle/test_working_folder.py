"""What of the user's folder goes to other nodes."""

import zipfile
from pathlib import Path

from asyncrl.engine.lifecycle.working_folder import LARGEST_FILE_BYTES, pack_folder


def test_modules_and_presets_go_and_runs_hidden_excluded_and_large_files_stay(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    for name in (
        "mine.py",
        "sub/preset.yaml",
        "runs/one/events.jsonl",
        ".git/config",
        "data/set.jsonl",
        "env/pyvenv.cfg",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name, encoding="utf-8")
    with (folder / "model.bin").open("wb") as file:
        file.truncate(LARGEST_FILE_BYTES + 1)
    (folder / "sub/back").symlink_to(folder)
    packed = [tmp_path / "one.zip", tmp_path / "two.zip"]
    assert [pack_folder(folder, zip_, exclude=["data/*"]) for zip_ in packed] == [2, 2]
    with zipfile.ZipFile(packed[0]) as found:
        assert found.namelist() == ["working-folder/mine.py", "working-folder/sub/preset.yaml"]
    # Ray would send a package with another content again.
    assert packed[0].read_bytes() == packed[1].read_bytes()
