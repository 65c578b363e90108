"""The local page: who may ask, what they get, and that nothing outside the folder is ever given (rule 62)."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient
from tests._serve.small import Looks, Small, looks_at, served
from tests.browser.recordings import sentence

HOST = "127.0.0.1:8600"
TEXT = " ".join(f"word{n}" for n in range(150))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "inside"
    (inside / "deeper").mkdir(parents=True)
    sentence(title="one").save(inside / "one.regard")
    sentence(seed=1, title="two").save(inside / "deeper" / "two.regard")
    sentence(title="secret").save(tmp_path / "secret.regard")
    return inside


@pytest.fixture
def small() -> Small:
    return Small()


@pytest.fixture
def looks(folder: Path, small: Small) -> Looks:
    return looks_at(folder, small)


@pytest.fixture
def client(folder: Path, looks: Looks) -> Iterator[TestClient]:
    app = served(looks, folder, HOST, "localhost:8600")
    with TestClient(app, base_url=f"http://{HOST}") as made:
        yield made


def test_rule_62_a_foreign_host_is_refused_everywhere(client: TestClient) -> None:
    for path in ("/", "/page.js", "/api/state", "/api/recording?name=one.regard", "/nowhere"):
        for host in (
            "evil.example",
            "evil.example:8600",
            "127.0.0.1:8601",
            "127.0.0.1",
            "127.0.0.1:8600.evil.example",
            "",
        ):
            assert client.get(path, headers={"host": host}).status_code == 403, (path, host)
        assert client.get(path, headers={"host": "LOCALHOST:8600"}).status_code != 403


def test_rule_62_a_foreign_origin_may_change_nothing(client: TestClient, looks: Looks) -> None:
    body = {"model": "small", "text": TEXT}
    for origin in (
        "http://evil.example",
        "null",
        f"https://{HOST}",
        f"http://{HOST}.evil.example",
        "http://localhost:8601",
    ):
        for call in (
            lambda o: client.post("/api/look", json=body, headers={"origin": o}),
            lambda o: client.delete("/api/look", headers={"origin": o}),
        ):
            assert call(origin).status_code == 403
    assert client.post("/api/look", json=body, headers={"sec-fetch-site": "cross-site"}).status_code == 403
    assert looks.state() == {"state": "none"}
    assert client.post("/api/look", json=body, headers={"origin": f"http://{HOST}"}).status_code == 202
    looks.wait(20)


def test_rule_62_no_answer_lets_another_page_read_it(client: TestClient) -> None:
    for path in (
        "/",
        "/page.js",
        "/api/state",
        "/api/recording?name=one.regard",
        "/api/recording?name=none.regard",
        "/nowhere",
    ):
        answer = client.get(path, headers={"origin": "http://evil.example"})
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert answer.headers["x-frame-options"] == "DENY"
    assert client.options("/api/look").status_code == 405
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', client.get("/").text)
    assert (
        policy is not None
        and policy[1].startswith("default-src ")
        and "unsafe" not in policy[1]
        and "http" not in policy[1]
    )


def test_rule_62_paths_stay_inside_the_folder_links_too(client: TestClient, folder: Path) -> None:
    os.symlink(folder.parent / "secret.regard", folder / "link.regard")
    os.symlink(folder.parent, folder / "up")
    os.symlink(folder / "one.regard", folder / "good.regard")
    (folder / "notes.txt").write_text("secret")
    (folder / "folder.regard").mkdir()
    outside = [
        "../secret.regard",
        "deeper/../../secret.regard",
        str(folder.parent / "secret.regard"),
        "link.regard",
        "up/secret.regard",
        "notes.txt",
        "folder.regard",
        "one.regard/",
        "none.regard",
        "\0.regard",
        "..\\secret.regard",
        "/etc/passwd",
        "x" * 5000 + ".regard",
    ]
    for name in outside:
        answer = client.get("/api/recording", params={"name": name})
        assert answer.status_code == 404, name
        assert answer.json() == {"error": "there is no such recording"}
    found = {one["name"]: one["title"] for one in client.get("/api/state").json()["recordings"]}
    listed = set(found)
    assert listed == {"one.regard", "deeper/two.regard", "good.regard"}
    assert found == {"one.regard": "one", "deeper/two.regard": "two", "good.regard": "one"}  # what each is of
    for name in listed:
        assert client.get("/api/recording", params={"name": name}).status_code == 200


def test_a_file_that_is_no_recording_is_listed_by_its_name_alone(client: TestClient, folder: Path) -> None:
    header = b'{"__metadata__":{"regard":"[1]"}}'
    (folder / "list.regard").write_bytes(len(header).to_bytes(8, "little") + header)
    (folder / "empty.regard").write_bytes(b"")
    titles = {one["name"]: one["title"] for one in client.get("/api/state").json()["recordings"]}
    assert titles["list.regard"] == titles["empty.regard"] == ""
    sentence(title="now one").save(folder / "list.regard")
    os.utime(folder / "list.regard", (1, 1))
    titles = {one["name"]: one["title"] for one in client.get("/api/state").json()["recordings"]}
    assert titles["list.regard"] == "now one"  # the file was written again


def test_rule_62_long_bodies_are_refused_with_and_without_a_length(client: TestClient, looks: Looks) -> None:
    long = b'{"model": "small", "text": "' + b"x" * (1 << 20) + b'"}'
    assert client.post("/api/look", content=long).status_code == 413

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(long), 65536):
            yield long[start : start + 65536]

    assert client.post("/api/look", content=pieces()).status_code == 400
    assert client.post("/api/look", content=b"{}", headers={"content-length": "-1"}).status_code == 413
    for body in (b"", b"[]", b"{", b"[" * 100_000, b'{"model": 3, "text": "a"}', b'{"model": "small", "text": " "}'):
        assert client.post("/api/look", content=body).status_code == 400, body[:20]
    assert looks.state() == {"state": "none"}


def test_a_file_that_is_no_recording_is_one_sentence_without_a_path(client: TestClient, folder: Path) -> None:
    (folder / "bad.regard").write_bytes(b"\xff" * 64)
    answer = client.get("/api/recording?name=bad.regard")
    assert answer.status_code == 422
    assert "not a recording" in answer.json()["error"] and str(folder) not in answer.text


def test_a_look_runs_with_progress_and_its_recording_is_saved(
    client: TestClient, looks: Looks, small: Small, folder: Path
) -> None:
    small.go.clear()
    assert client.post("/api/look", json={"model": "small", "text": TEXT}).status_code == 202
    assert small.begun.wait(20)
    state = client.get("/api/look").json()
    assert (state["state"], state["stage"], state["total"]) == ("running", "reading", 2)
    assert client.post("/api/look", json={"model": "small", "text": TEXT}).status_code == 409
    small.go.set()
    looks.wait(20)
    state = client.get("/api/look").json()
    assert (state["state"], state["name"], state["done"]) == ("done", "small-1.regard", 2)
    assert (folder / "small-1.regard").is_file()
    assert client.get("/api/recording", params={"name": "small-1.regard"}).status_code == 200
    client.post("/api/look", json={"model": "small", "text": TEXT})
    looks.wait(20)
    assert looks.state()["name"] == "small-2.regard"


def test_a_look_can_be_cancelled_and_leaves_nothing(
    client: TestClient, looks: Looks, small: Small, folder: Path
) -> None:
    small.go.clear()
    client.post("/api/look", json={"model": "small", "text": TEXT})
    assert small.begun.wait(20)
    assert client.delete("/api/look").json() == {"state": "cancelled"}
    small.go.set()
    looks.wait(20)
    assert looks.state() == {"state": "cancelled"}
    assert not list(folder.glob("small*"))
    client.post("/api/look", json={"model": "small", "text": TEXT})
    looks.wait(20)
    assert looks.state()["state"] == "done"


def test_what_goes_wrong_in_a_look_is_told(client: TestClient, looks: Looks) -> None:
    assert client.post("/api/look", json={"model": "/etc", "text": "a"}).status_code == 404
    client.post("/api/look", json={"model": "broken", "text": "a"})
    looks.wait(20)
    assert looks.state()["why"] == "no model can be loaded from it"


def test_a_rectangle_of_exact_weights_is_that_of_the_model(client: TestClient, looks: Looks, small: Small) -> None:
    client.post("/api/look", json={"model": "small", "text": TEXT})
    looks.wait(20)
    asked: dict[str, Any] = {
        "name": "small-1.regard",
        "layer": 1,
        "head": 2,
        "row": 70,
        "rows": 11,
        "column": 3,
        "columns": 90,
    }
    answer = client.post("/api/weights", json=asked)
    assert answer.status_code == 200
    found = np.frombuffer(answer.content, np.float32).reshape(11, 90)
    recording = looks.recording("small-1.regard")
    assert recording is not None
    head = recording[1, 2]
    for row in range(11):
        for key, weight in zip(head.top_keys[70 + row].tolist(), head.top_weights[70 + row].tolist(), strict=True):
            if 3 <= key < 93:
                assert found[row, key - 3] == pytest.approx(weight, abs=1e-6)
    for change in (
        {"layer": 9},
        {"head": 99},
        {"rows": 0},
        {"rows": 10**9},
        {"row": 149},
        {"row": -1},
        {"row": "0"},
        {"row": True},
    ):
        assert client.post("/api/weights", json={**asked, **change}).status_code == 400, change
    assert client.post("/api/weights", json={**asked, "name": "one.regard"}).status_code == 404


def test_a_saved_look_has_exact_weights_again_as_long_as_its_model_is_there_and_the_same(
    client: TestClient, looks: Looks, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.post("/api/look", json={"model": "small", "text": TEXT})
    looks.wait(20)
    asked = {"name": "small-1.regard", "layer": 1, "head": 2, "row": 70, "rows": 11, "column": 3, "columns": 90}
    before = client.post("/api/weights", json=asked).content
    page = {"name": "small-1.regard"}

    def later(small: Small) -> TestClient:
        return TestClient(served(looks_at(folder, small), folder, HOST), base_url=f"http://{HOST}")

    again = later(Small())
    assert b'"detail":true' in zlib.decompress(again.get("/api/recording", params=page).content, -15)
    assert again.post("/api/weights", json=asked).content == before
    assert b'"detail"' not in zlib.decompress(again.get("/api/recording?name=one.regard").content, -15)
    monkeypatch.setattr(Small, "names", lambda self, folder: ["another"])
    gone = later(Small())
    assert b'"detail"' not in zlib.decompress(gone.get("/api/recording", params=page).content, -15)
    assert gone.post("/api/weights", json=asked).status_code == 404
    monkeypatch.undo()
    monkeypatch.setattr(Small, "seed", 7)
    other = later(Small()).post("/api/weights", json=asked)
    assert other.status_code == 409 and "other weights than this recording has" in other.json()["error"]
    monkeypatch.setattr(Small, "run", lambda self, *given, **more: 1 / 0)
    assert later(Small()).post("/api/weights", json=asked).json() == {"error": "division by zero"}


def serving(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "regard", "serve", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("how", "lang", "shows", "stopped"),
    [(signal.SIGINT, "en", "shows", "stopped"), (signal.SIGTERM, "zh", "显示", "已停止")],
)
def test_the_command_prints_an_address_of_this_machine_and_stops_cleanly(
    folder: Path, how: signal.Signals, lang: str, shows: str, stopped: str
) -> None:
    run = serving(str(folder), "--lang", lang)
    assert run.stdout is not None and run.stderr is not None
    try:
        address, verb, *_ = run.stdout.readline().split()
        assert verb == shows
        port = int(re.fullmatch(r"http://127\.0\.0\.1:(\d+)/", address)[1])  # type: ignore[index]
        with socket.create_connection(("127.0.0.1", port), timeout=20) as asked:
            asked.settimeout(20)
            asked.sendall(f"GET /api/state HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode())
            answer = b"".join(iter(lambda: asked.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 200") and b"one.regard" in answer
    finally:
        run.send_signal(how)
        said, complaint = run.communicate(timeout=30)
    assert (run.returncode, said.strip(), complaint) == (0, stopped, "")


def test_bad_words_are_one_line(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for words, expected in [
            ((str(folder / "none"),), "is not a folder"),
            ((str(folder), "--port", "70000"), "--port is 70000; expected 1 to 65535"),
            ((str(folder), "--port", str(taken.getsockname()[1])), "cannot be used"),
            ((str(folder), "--lang", "fr"), "expected en (English) or zh (Chinese)"),
        ]:
            run = serving(*words)
            said, complaint = run.communicate(timeout=60)
            assert (run.returncode, said) == (2, "") and expected in complaint and complaint.count("\n") == 1
