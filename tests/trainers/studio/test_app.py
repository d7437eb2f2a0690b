"""The studio's server: what it answers, and to whom."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import turntree.trainers.studio
from tests.trainers.studio.conftest import KEY, Answer, Client
from tests.trainers.studio.stored import EVIL, write_run
from turntree.trainers.studio.guard import POLICY, is_loopback

STATIC = Path(turntree.trainers.studio.__file__).parent / "static"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, open_studio: Callable[..., Client]) -> Client:
    folder = tmp_path_factory.mktemp("studio")
    write_run(folder / "runs" / "one", steps=2, trees=3, leaves=6)
    write_run(folder / "runs" / "evil", steps=1, trees=2, leaves=4, evil=True)
    (folder / "secret.txt").write_text("secret")
    return open_studio(folder / "runs")


def test_runs_steps_trees_and_a_tree(client: Client) -> None:
    runs = client.ask("/api/runs").json
    assert [run["id"] for run in runs["runs"]] == ["evil", "one"]
    assert "grpo" in runs["rules"]
    assert [row["step"] for row in client.ask("/api/steps", run="one").json["steps"]] == [1, 2]
    trees = client.ask("/api/trees", run="one", step=2).json["trees"]
    assert [tree["index"] for tree in trees] == [0, 1, 2]
    tree = client.ask("/api/tree", run="one", step=2, index=1).json
    assert tree["summary"] == trees[1]
    tokens = client.ask("/api/tokens", run="one", step=2, index=1, node="0").json
    assert len(tokens["ids"]) == len(tokens["columns"]["value"]) > 0
    assert tokens["pieces"] is None
    assert [hit["step"] for hit in client.ask("/api/search", run="one", q="king 1").json["hits"]] == [2, 1]
    assert len(client.ask("/api/same", run="one", step=2, index=1).json["trees"]) == 2


def test_explain_takes_the_runs_rule_or_a_built_in_one_and_no_import_path(client: Client) -> None:
    assert "scored leaves" in client.ask("/api/explain", run="one", step=2, index=0).json["text"]
    assert client.ask("/api/explain", run="one", step=2, index=0, credit="rloo").json["text"].count("rloo") >= 1
    refused = client.ask("/api/explain", run="one", step=2, index=0, credit="os:system")
    assert (refused.status, "no built-in credit rule" in refused.json["message"]) == (404, True)


def test_exports_are_attachments(client: Client) -> None:
    as_json = client.ask("/api/export/json", run="evil", step=1, index=0)
    assert as_json.json["uid"] == "0/0"
    html = client.ask("/api/export/html", run="evil", step=1, index=0)
    assert EVIL not in html.body.decode()
    assert "&lt;script&gt;window.pwned" in html.body.decode()
    for answer in (as_json, html):
        assert answer.headers["content-disposition"].startswith("attachment; filename=")


# Who may ask ----------------------------------------------------------------------------------------------------------


def refused(answer: Answer, status: int) -> None:
    assert answer.status == status
    assert b"run.json" not in answer.body
    assert b"secret" not in answer.body.replace(b"session", b"")


def test_the_key_is_asked_for_once_and_leaves_the_address(client: Client) -> None:
    refused(client.ask("/", with_key=False), 401)
    refused(client.ask("/api/runs", with_key=False), 401)
    refused(client.ask("/?key=wrong", with_key=False), 401)
    refused(client.ask(f"/api/runs?key={KEY}", with_key=False), 401)
    answer = client.ask(f"/?key={KEY}", with_key=False)
    assert (answer.status, answer.headers["location"]) == (303, "/")
    assert {"HttpOnly", "SameSite=Lax"} <= set(answer.headers["set-cookie"].split("; "))
    assert client.ask("/").status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::2]", "a@127.0.0.1"]
)
def test_names_that_were_pointed_here_are_refused(client: Client, host: str) -> None:
    refused(client.ask("/api/runs", headers={"Host": host}), 421)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9999", "[::1]:80", "LOCALHOST:1"])
def test_this_machine_by_any_name_and_forwarded_port_is_answered(client: Client, host: str) -> None:
    assert client.ask("/api/runs", headers={"Host": host}).status == 200


def test_pages_of_other_sites_may_not_ask(client: Client) -> None:
    place = {"run": "one", "step": 1, "index": 0, "node": "root", "turns": []}
    refused(client.ask("/api/runs", headers={"Origin": "https://evil.example"}), 403)
    refused(client.ask("/api/runs", headers={"Origin": "null"}), 403)
    refused(client.ask("/api/runs", headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}), 403)
    refused(client.ask("/api/fork/resume", body=place, headers={"Sec-Fetch-Site": "same-site"}), 403)
    refused(client.ask("/api/fork/resume", body=place, headers={"Content-Type": "text/plain"}), 415)
    refused(client.ask("/api/fork/resume", body=b"x" * 1_100_000), 400)
    same = {"Origin": client.url, "Sec-Fetch-Site": "same-origin"}
    assert client.ask("/api/runs", headers=same).status == 200
    # A link on another page may lead here: it reads nothing.
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert client.ask("/", headers=link).status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/static//etc/passwd",
        "/static/vendor/../../app.py", "/static/vendor", "/static/", "/static/README.md", "/docs", "/openapi.json",
        "/api/none",
    ],
)  # fmt: skip
def test_no_path_leads_out_of_the_packaged_files(client: Client, path: str) -> None:
    answer = client.ask(path)
    assert answer.status == 404
    assert b"import" not in answer.body


@pytest.mark.parametrize("name", ["../secret.txt", "..", "one/../../secret.txt", "/etc", "", "ONE"])
def test_runs_are_named_and_never_paths(client: Client, name: str) -> None:
    answer = client.ask("/api/steps", run=name)
    assert answer.status == 404
    assert "no run" in answer.json["message"]


def test_bad_questions_get_a_sentence(client: Client) -> None:
    assert client.ask("/api/tree", run="one", step=1, index=99).status == 404
    assert client.ask("/api/tree", run="one", step=77, index=0).status == 404
    assert "greater than" in client.ask("/api/tree", run="one", step=-1, index=0).json["message"]
    assert client.ask("/api/tokens", run="one", step=1, index=0, node="../x").status == 422
    assert client.ask("/api/search", run="one", q="").status == 422
    assert client.ask("/api/search", run="one", q="x" * 600).status == 422
    assert client.ask("/api/fork/play", body={"run": "one"}).status == 422


def test_every_answer_forbids_foreign_and_inline_script(client: Client) -> None:
    for answer in (client.ask("/"), client.ask("/api/runs"), client.ask("/nothing"), client.ask("/", with_key=False)):
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in answer.headers
    assert "unsafe" not in POLICY
    assert "default-src 'none'" in POLICY


def test_the_page_asks_nobody_else_and_reads_no_text_as_html() -> None:
    own = [path for path in STATIC.iterdir() if path.suffix in (".js", ".html", ".css")]
    assert len(own) > 10
    for path in own:
        text = path.read_text(encoding="utf-8")
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function|srcdoc", text
        ), path
        links = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"'`]*", text)) - {"http://www.w3.org/2000/svg"}
        assert not links, (path, links)
    licences = (STATIC / "vendor" / "LICENSES.txt").read_text(encoding="utf-8")
    for package in re.findall(r'from "([^"/]+)', (STATIC / "vendor" / "entry.txt").read_text(encoding="utf-8")):
        assert f"\n{package} " in licences


def test_loopback_names() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "::1", "[::1]", "localhost", "127.3.2.1", "x.localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "example.org", "10.0.0.1", "localhost.evil.example", "")))


def test_no_fork(tmp_path: Path, open_studio: Callable[..., Client]) -> None:
    write_run(tmp_path / "run", steps=1, trees=1, leaves=2)
    client = open_studio(tmp_path / "run", fork=False)
    body: dict[str, Any] = {"run": "run", "step": 1, "index": 0, "node": "root", "turns": []}
    for answer in (client.ask("/api/fork", run="run"), client.ask("/api/fork/resume", body=body)):
        assert "--no-fork" in answer.json["message"]
    assert json.loads(client.ask("/api/runs").body)["fork"] is False
