"""`covey export --push`: a hub that keeps what it is sent."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from covey.commands.export import upload
from covey_verify.errors import ConfigError


class Hub(BaseHTTPRequestHandler):
    """The routes of the hub that an upload asks; files arrive within the commit."""

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self.answer({"id": "a/b", "sha": "0" * 40, "siblings": []})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.seen.append((self.path, body))  # type: ignore[attr-defined]
        address = f"http://127.0.0.1:{self.server.server_port}/a/b"  # type: ignore[attr-defined]
        if "preupload" in self.path:
            files = [{"path": f["path"], "shouldIgnore": False} for f in json.loads(body)["files"]]
            self.answer({"files": [{**file, "uploadMode": "regular"} for file in files]})
        else:
            commit = {"commitUrl": f"{address}/commit/{'0' * 40}", "commitOid": "0" * 40, "success": True}
            self.answer({"url": address, "name": "a/b", "errors": [], "warnings": [], **commit})

    def answer(self, value: object) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.seen = []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        yield server
        server.shutdown()


@pytest.mark.parametrize("public", [False, True])
def test_a_model_is_uploaded_privately_unless_asked(
    hub: ThreadingHTTPServer, tmp_path: Path, public: bool
) -> None:
    (tmp_path / "README.md").write_text("---\ntags: [covey]\n---\n# Model\n")
    (tmp_path / "config.json").write_text("{}")
    assert upload(tmp_path, "a/b", public).endswith("/a/b")
    paths, bodies = zip(*hub.seen, strict=True)  # type: ignore[attr-defined]
    created = json.loads(bodies[paths.index("/api/repos/create")])
    assert created["visibility"] == ("public" if public else "private")
    commit = next(b for p, b in hub.seen if "/commit/" in p)  # type: ignore[attr-defined]
    assert b'"config.json"' in commit and b'"README.md"' in commit


def test_a_hub_that_cannot_be_reached_leaves_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"offline mode.*`hf upload a/b"):
        upload(tmp_path, "a/b")
    with pytest.raises(ConfigError, match="--push a/b/c: "):
        upload(tmp_path, "a/b/c")
