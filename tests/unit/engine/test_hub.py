"""Models by their names on the Hugging Face Hub: cache, fetch, what goes wrong, and what a run is told."""

import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from asyncrl.configs import Loaded, load
from asyncrl.configs.load import as_overrides
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.model.hub import Fetch, fetch_in_process, source_of
from asyncrl.engine.model.hub_fetch import answer
from asyncrl.engine.running.named_model import what_comes_first, with_cached_model, with_model

NAME, COMMIT, NEWER = "ada/tiny", "0f3c" * 10, "1a2b" * 10
FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, for this process and for those that it starts, in an empty working folder."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name, value in {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "hub"


def keep(cache: Path, commit: str = COMMIT, *, without: str | None = None) -> Path:
    """Lay a model out in the cache as huggingface_hub does: a ref, blobs, and links to them."""
    top = cache / "models--ada--tiny"
    folder = top / "snapshots" / commit
    for part in (folder, top / "refs", top / "blobs"):
        part.mkdir(parents=True, exist_ok=True)
    (top / "refs" / "main").write_text(commit, encoding="utf-8")
    for name, content in FILES.items():
        if name != without:
            (top / "blobs" / name).write_bytes(content)
        (folder / name).symlink_to(f"../../blobs/{name}")  # An interrupted download leaves a link to nothing.
    return folder


def named(**values: object) -> Loaded:
    return load("default", as_overrides({"model": {"path": NAME, **values}}))


def gives(**answer: str) -> Fetch:
    def fetch(name: str, revision: str, timeout_s: float) -> Mapping[str, str]:
        assert (name, timeout_s) == (NAME, 3600.0)
        return answer

    return fetch


def unasked(name: str, revision: str, timeout_s: float) -> Mapping[str, str]:
    raise AssertionError("the hub was asked")


def test_offline_the_cache_is_taken_and_the_hub_is_not_asked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = keep(cache)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found = with_model(named(), print, fetch=unasked)
    assert (found.config.model.path, found.config.model.revision) == (str(folder), None)
    assert source_of(str(folder)) == (NAME, COMMIT)


def test_a_commit_in_the_cache_is_not_asked_for_but_a_branch_is(cache: Path) -> None:
    folder = keep(cache)
    assert with_model(named(revision=COMMIT), print, fetch=unasked).config.model.path == str(folder)
    newer = keep(cache, NEWER)
    told: list[str] = []
    found = with_model(named(), told.append, fetch=gives(folder=str(newer)))
    assert found.config.model.path == str(newer)
    assert "ada/tiny; what is not in the cache is fetched, for at most 3600 s" in told[0]


def test_where_the_hub_cannot_be_reached_the_cache_is_taken_and_a_line_says_so(cache: Path) -> None:
    folder = keep(cache)
    told: list[str] = []
    found = with_model(named(), told.append, fetch=gives(kind="unreachable", detail="no route"))
    assert found.config.model.path == str(folder)
    assert "did not give ada/tiny (no route); the cache has it" in told[1]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"kind": "not_found"}, "was not found: check the spelling"),
        ({"kind": "gated"}, "is gated: accept its terms"),
        ({"kind": "no_revision"}, r"at model\.revision 'v9' was found without that revision"),
        ({"kind": "unreachable"}, "is not in the cache .* and the Hub cannot be reached"),
        ({"kind": "late"}, r"was not fetched within model\.fetch_timeout_s 3600"),
        ({"kind": "failed"}, "was not fetched; is there room in"),
    ],
)
def test_what_the_hub_refuses_is_told_by_option(cache: Path, answer: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.path is 'ada/tiny', which is not a folder here.*{message}.*why"):
        with_model(named(revision="v9"), print, fetch=gives(**answer, detail="why"))


@pytest.mark.parametrize("lost", sorted(FILES))
def test_a_download_that_was_interrupted_does_not_count_as_cached(
    cache: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    keep(cache, without=lost)
    assert what_comes_first(named()) == "fetch it from the Hugging Face Hub, if it is there"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    # A dry run says no less.
    for refused in (lambda: with_model(named(), print, fetch=unasked), lambda: what_comes_first(named())):
        with pytest.raises(ConfigError, match=r"is not in the cache .* and HF_HUB_OFFLINE is set"):
            refused()


def test_a_dry_run_asks_nothing_and_says_what_it_did_not(cache: Path) -> None:
    folder = keep(cache)
    told: list[str] = []
    assert what_comes_first(named()) is None
    found = with_cached_model(named(), told.append)
    assert found.config.model.path == str(folder)
    assert "the Hub was not asked whether it has a newer one" in told[0]


def test_a_local_folder_comes_first_and_has_no_revision(cache: Path) -> None:
    keep(cache)
    Path(NAME).mkdir(parents=True)
    loaded = named()
    assert with_model(loaded, print, fetch=unasked) is loaded
    for one in (named(revision="v1"), load("default", as_overrides({"model.revision": "v1"}))):
        with pytest.raises(ConfigError, match=r"model\.revision \(from overrides\) is 'v1'.*it must be null"):
            what_comes_first(one)


class Hub(BaseHTTPRequestHandler):
    """What snapshot_download asks of the hub: one model and a gated one."""

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        refused = {"gated": (403, "GatedRepo"), "nothing": (404, "RepoNotFound")}
        for name, (status, code) in refused.items():
            if path.startswith(f"/api/models/ada/{name}"):
                self._send(status, b"{}", {"X-Error-Code": code}, body=body)
                return
        if path == f"/api/models/{NAME}/revision/main":
            self._send(200, json.dumps({"id": NAME, "sha": COMMIT, "siblings": []}).encode(), {}, body=body)
        elif path == f"/api/models/{NAME}/tree/{COMMIT}":
            more = {**FILES, "pytorch_model.bin": b"pickled", "onnx/config.json": b"{}"}
            tree = [{"type": "file", "path": name, "size": len(it), "oid": "0"} for name, it in more.items()]
            self._send(200, json.dumps(tree).encode(), {}, body=body)
        elif path.startswith(f"/{NAME}/resolve/{COMMIT}/"):
            content = FILES[path.rpartition("/")[2]]
            name = path.rpartition("/")[2]
            self._send(200, content, {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT}, body=body)
        else:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body=body)

    def _send(self, status: int, content: bytes, headers: Mapping[str, str], *, body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield
    server.shutdown()
    server.server_close()


def test_a_model_is_fetched_by_huggingface_hub_itself_without_what_no_run_reads(cache: Path, hub: None) -> None:
    found = with_model(named(), print)
    folder = Path(str(found.config.model.path))
    assert source_of(str(folder)) == (NAME, COMMIT)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES
    assert what_comes_first(named()) is None, "it is in the cache now"
    assert fetch_in_process(NAME, "main", 0.05)["kind"] == "late"


def test_refusals_of_huggingface_hub_have_the_kinds_that_messages_are_made_of(hub: None) -> None:
    asked = [("ada/gated", "main"), ("ada/nothing", "main"), (NAME, "v9"), ("not--a/name", "main")]
    assert [answer(*one)["kind"] for one in asked] == ["gated", "not_found", "no_revision", "not_found"]


def test_a_hub_that_cannot_be_reached_is_told_apart(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert answer(NAME, "main")["kind"] == "unreachable"
