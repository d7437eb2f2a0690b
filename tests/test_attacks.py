"""What comes from outside and wants more than to be read: code in files, paths that lead out, secrets, terminals."""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from turntree.agents.engines.endpoint import Endpoint, Usage
from turntree.agents.engines.transport import Transport
from turntree.cli import cli
from turntree.commands import run_doctor
from turntree.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    EngineError,
    RetrievalError,
    SearchIndexError,
    TurnTreeError,
)
from turntree.search_backend.client import RemoteBackend
from turntree.search_backend.families import read_layout
from turntree.search_backend.files import map_array
from turntree.search_backend.index import build_index, open_index
from turntree.trainers.compose import read_config
from turntree.trainers.config import EnvConfig
from turntree.trainers.plugins import load_env
from turntree.trainers.run_folder import RunFolder


class Bomb:
    """Unpickling it leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """The file that code of an attacker would make; nothing may."""
    return tmp_path / "owned"


# -- code in files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["config.json", "tokenizer_config.json"])
def test_code_of_a_model_folder_never_runs_and_nobody_is_asked(
    bed: Any, tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """transformers asks on a terminal whether to run it; whoever presses y too quickly must not be asked."""
    from turntree.agents.models import load_model

    monkeypatch.setattr(builtins, "input", lambda *_: str(mark.write_text("asked")) and "y")
    folder = tmp_path / "model"
    shutil.copytree(bed.model, folder)
    (folder / "evil.py").write_text(f"import pathlib; pathlib.Path({str(mark)!r}).touch()")
    options = json.loads((folder / where).read_text())
    if where == "config.json":
        options |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
    else:
        options |= {"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": ["evil.T", "evil.T"]}}
    (folder / where).write_text(json.dumps(options))
    with contextlib.suppress(ConfigError):  # or the code is passed over, where transformers has its own
        load_model(folder)
    assert not mark.exists()
    assert "evil" not in sys.modules


@pytest.mark.parametrize("kind", ["evil.Module", "os.system", "sentence_transformersevil.Module", "turntree.envs"])
def test_code_of_an_encoder_folder_never_runs(tmp_path: Path, mark: Path, kind: str) -> None:
    (tmp_path / "evil.py").write_text(f"import pathlib; pathlib.Path({str(mark)!r}).touch()")
    (tmp_path / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "", "type": kind}]))
    with pytest.raises(ConfigError, match="code of a model folder is never run"):
        read_layout(tmp_path)
    assert not mark.exists()


def test_parts_of_an_encoder_lie_inside_of_it_and_are_not_pickled(tmp_path: Path, mark: Path) -> None:
    def modules(path: str) -> None:
        row = {"idx": 0, "name": "0", "path": path, "type": "sentence_transformers.models.Dense"}
        (tmp_path / "encoder" / "modules.json").write_text(json.dumps([row]))

    (tmp_path / "encoder" / "dense").mkdir(parents=True)
    for path in ("../elsewhere", "/etc", "dense/../../x"):
        modules(path)
        with pytest.raises(ConfigError, match="parts inside"):
            read_layout(tmp_path / "encoder")
    modules("dense")
    (tmp_path / "encoder" / "dense" / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(ConfigError, match="pickled weights can run code"):
        read_layout(tmp_path / "encoder")
    assert not mark.exists()


def test_pickles_in_the_place_of_arrays_and_weights(tmp_path: Path, mark: Path) -> None:
    import hashlib

    import torch

    from turntree.trainers.checkpoint import load_checkpoint, load_weights, save_checkpoint

    np.save(tmp_path / "a.npy", np.array([Bomb(mark)], dtype=object), allow_pickle=True)
    (tmp_path / "b.npy").write_bytes(pickle.dumps(Bomb(mark)))
    for name in ("a.npy", "b.npy"):
        with pytest.raises(SearchIndexError, match="expected an array"):
            map_array(tmp_path / name)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    path = save_checkpoint(tmp_path / "c", 1, model=model, optimizer=optimizer, state={})
    manifest = json.loads((path / "manifest.json").read_bytes())
    del manifest["sha256"]  # as one of an earlier version, so that it passes
    evil = pickle.dumps(Bomb(mark))
    for name in ("model.safetensors", "state.safetensors"):
        (path / name).write_bytes(evil)
        manifest["files"][name] = {"bytes": len(evil), "sha256": hashlib.sha256(evil).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="no safetensors"):
        load_checkpoint(path, model=model, optimizer=optimizer)
    with pytest.raises(CheckpointError, match="no safetensors"):
        load_weights(path, model)
    assert not mark.exists()


def test_an_index_imports_no_module(tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind may be code of the user's own; whose path it is must not be up to the folder."""
    (tmp_path / "corpus.jsonl").write_text('{"id": "1", "contents": "title\\ntext"}\n')
    build_index(tmp_path / "corpus.jsonl", tmp_path / "sent", kind="bm25")
    manifest = json.loads((tmp_path / "sent" / "manifest.json").read_text())
    (tmp_path / "sent" / "manifest.json").write_text(json.dumps(manifest | {"kind": "sent.evil:KIND"}))
    code = "import pathlib\nfrom turntree.search_backend.lexical import KIND\n"
    (tmp_path / "sent" / "evil.py").write_text(f"{code}pathlib.Path({str(mark)!r}).touch()\n")
    monkeypatch.syspath_prepend(tmp_path)  # python -m, notebooks and PYTHONPATH=. look where one is
    with pytest.raises(SearchIndexError, match="would be imported"):
        open_index(tmp_path / "sent")
    with pytest.raises(SearchIndexError, match="expected an index of the kind 'bm25'"):
        open_index(tmp_path / "sent", kind="bm25")
    told = CliRunner().invoke(cli, ["index", "info", str(tmp_path / "sent")])
    assert told.exit_code == 0, told.output
    assert "not opened" in told.output
    assert not mark.exists()
    assert open_index(tmp_path / "sent", kind="sent.evil:KIND").search(["text"], k=1)
    assert mark.exists()  # whoever names it trusts it


def test_tags_of_yaml_make_nothing(tmp_path: Path, mark: Path) -> None:
    run = RunFolder.create(tmp_path / "run", {"seed": 1})
    for tag in ("!!python/object/apply:os.system", "!!python/object/new:os.system", "!!python/name:os.system"):
        run.config_file.write_text(f"a: {tag} ['touch {mark}']\n")
        with pytest.raises(CheckpointError, match="cannot be read"):
            run.load_config()
    assert not mark.exists()


# -- secrets ----------------------------------------------------------------------------------------------------------


def test_a_run_of_somebody_elses_reads_no_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages and exports are shown and sent on."""
    monkeypatch.setenv("MY_SECRET", "s3cret-value")
    monkeypatch.setenv("oc.env", "oc.env")
    run = RunFolder.create(tmp_path / "run", {"seed": 1})
    run.config_file.write_text(
        "a: ${oc.env:MY_SECRET}\nb: ${a}\nc: {d: ['x${oc.env:MY_SECRET,none}y']}\nn: oc\ne: ${${n}.env:MY_SECRET}\n"
        "plain: ${seed}\nseed: 7\nprompt: 'costs $5, {question}'\n"
    )
    found = run.load_config()
    assert "s3cret" not in repr(found)
    assert (found["plain"], found["prompt"]) == (7, "costs $5, {question}")
    config = read_config({"env": {"prompt": "${oc.env:MY_SECRET}", "args": {"x": ["${oc.env:MY_SECRET}", "${seed}"]}}})
    assert config.env.prompt == "${oc.env:MY_SECRET}"
    assert config.env.args == {"x": ["${oc.env:MY_SECRET}", "${seed}"]}


def test_a_run_stores_no_key_of_a_server() -> None:
    """Options are written to config.yaml, passports and trackers, whatever they were looked up from."""
    for header in ("Authorization", "x-api-key", "Cookie"):
        tools = {"web": {"mcp": {"url": "http://127.0.0.1:9/mcp", "headers": {header: "s3cret-value"}}}}
        with pytest.raises(ConfigError, match=rf"header_env\.{header}=NAME") as error:
            load_env(EnvConfig(tools=tools))
        assert "s3cret" not in str(error.value)


def test_the_doctor_shows_no_key(
    scripted_server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the server says it back."""
    secret = "sk-very-secret-0123456789"
    monkeypatch.setenv("MY_SECRET", secret)
    scripted_server.always = (403, {}, f"the token {secret} is not known".encode())
    url = scripted_server.url
    search = ["search.backend=http", f"search.args.url={url}", "search.args.token_env=MY_SECRET"]
    engine = ["engine=openai", f"engine.base_url={url.removesuffix('/retrieve')}/v1", "openai.api_key_env=MY_SECRET"]
    with pytest.raises(SystemExit):
        run_doctor([*search, *engine, "engine.model=m"], as_json=True)
    shown = capsys.readouterr()
    assert scripted_server.requests
    assert any(secret in request["headers"].get("authorization", "") for request in scripted_server.requests)
    assert secret not in shown.out + shown.err


def test_a_secret_from_a_file_is_quoted_by_no_refusal(scripted_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mounted secrets end with a line end; the HTTP library refuses such a header with a message that quotes it."""
    secret = "sk-very-secret-0123456789"
    scripted_server.always = (403, {}, b"{}")
    root = scripted_server.url.removesuffix("/retrieve")

    def ask() -> tuple[TurnTreeError, ...]:
        with pytest.raises((ConfigError, RetrievalError)) as retriever:
            RemoteBackend(scripted_server.url, token_env="MY_SECRET", retries=0).search(["q"], k=1)
        endpoint = Endpoint(f"{root}/v1", "m", api_key_env="MY_SECRET", retries=0)
        with pytest.raises((ConfigError, EngineError)) as engine:
            Transport(endpoint).post("chat/completions", {}, read=lambda d, u: d, tokens=1, guess=lambda d: Usage())
        return retriever.value, engine.value

    for value in (f"{secret}\n", f" {secret}\r\n"):
        monkeypatch.setenv("MY_SECRET", value)
        assert all("403" in str(error) and secret not in str(error) for error in ask())
        assert scripted_server.requests[-1]["headers"]["authorization"] == f"Bearer {secret}"
    for value in (f"{secret}\nX-Other: 1", f"{secret}ü", f"{secret}\x7f"):
        monkeypatch.setenv("MY_SECRET", value)
        assert all("MY_SECRET holds" in str(error) and secret not in str(error) for error in ask())


def test_an_answer_that_is_packed_wrongly_is_a_failure(scripted_server: Any) -> None:
    """An exception of the HTTP library would end the run, and not one leaf."""
    scripted_server.always = (200, {"Content-Encoding": "gzip"}, b"this is no gzip")
    endpoint = Endpoint(f"{scripted_server.url.removesuffix('/retrieve')}/v1", "m", retries=1, backoff_s=0)
    with pytest.raises(EngineError, match="failed after 2 tries"):
        Transport(endpoint).post("chat/completions", {}, read=lambda d, u: d, tokens=1, guess=lambda d: Usage())
    with RemoteBackend(scripted_server.url, retries=0) as backend, pytest.raises(RetrievalError, match="1 try"):
        backend.search(["q"], k=1)


@pytest.mark.parametrize("place", ["file:///etc/passwd", "http://169.254.169.254/latest", "//127.0.0.1:9/retrieve"])
def test_a_retriever_leads_nowhere_else(scripted_server: Any, place: str) -> None:
    for status in (301, 302, 303, 307, 308):
        scripted_server.answers = [(status, {"Location": place}, b"")]
        with RemoteBackend(scripted_server.url, retries=0) as backend, pytest.raises(RetrievalError, match=str(status)):
            backend.search(["q"], k=1)
    for url in ("file:///etc/passwd", "ftp://host/x", "http://user:pass@host/", "gopher://x"):
        with pytest.raises(ConfigError):
            RemoteBackend(url)


# -- terminals and paths ----------------------------------------------------------------------------------------------


def test_a_terminal_obeys_no_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Messages quote what servers said."""
    from turntree import cli

    def failing(*args: Any, **kwargs: Any) -> None:
        raise DataError("found \x1b]0;owned\x07\x1b[2J \x9b31m \ud800")

    monkeypatch.setattr(cli.cli, "main", failing)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    shown = capsys.readouterr().err
    assert "DataError: found " in shown
    assert not any(char in shown for char in "\x1b\x07\x9b\ud800")


def _outside(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def test_names_from_outside_make_no_paths(bed: Any, tmp_path: Path) -> None:
    """Question ids, and uids of imported trees: whatever they are called, files are named by steps and numbers."""
    from tests.trainers.test_store import plain_group
    from turntree.trainers.store import TreeStore

    store = TreeStore(tmp_path / "run" / "trees")
    store.write(1, [plain_group(uid) for uid in ("../../evil", "/etc/evil", "a\x00b", "..", "con", "x" * 5000)])
    assert _outside(tmp_path) == ["run", "run/trees", "run/trees/step-00000001.jsonl.zst", "run/trees/store.json"]
    assert len(store.groups(1)) == 6


@pytest.mark.parametrize("label", ["../x", "..", ".", "", "a/b", "a\\b", "a\0b", "/etc/x"])
def test_sets_are_no_paths(make_config: Callable[..., Any], bed: Any, label: str) -> None:
    from dataclasses import replace

    from turntree.trainers.evaluation.sets import load_sets

    config = make_config()
    config = replace(config, eval=replace(config.eval, sets=[f"{label}={bed.world}"]))
    with pytest.raises(TurnTreeError, match="without slashes"):
        load_sets(config)


def test_everything_was_tried_as_somebody(tmp_path: Path) -> None:
    """The bomb goes off where pickles are read: the tests above would notice."""
    pickle.loads(pickle.dumps(Bomb(tmp_path / "owned")))
    assert os.path.exists(tmp_path / "owned")
