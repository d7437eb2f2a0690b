"""turntree doctor on things that are really broken: each fails by name, says what it found and what to do."""

from __future__ import annotations

import functools
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.disk import small_disk
from turntree.agents.engines.choose import Machine
from turntree.commands import run_doctor
from turntree.search_backend import BM25Backend
from turntree.search_backend.index import build_index
from turntree.search_backend.replay import SearchStore
from turntree.trainers import doctor
from turntree.trainers.checkpoint import save_checkpoint
from turntree.trainers.compose import compose
from turntree.trainers.config import RunConfig
from turntree.trainers.doctor import Check, folders, model_gb, services
from turntree.trainers.doctor import machine as machine_checks
from turntree.trainers.doctor.model import model
from turntree.trainers.doctor.options import options

MakeConfig = Callable[..., RunConfig]
HERE = Machine(memory_gb=16)


@pytest.fixture(scope="module")
def make_config(bed: Any) -> MakeConfig:
    """As the one for all tests, without composing a configuration for each."""
    base = compose(bed.args)
    return lambda *overrides: functools.reduce(overridden, overrides, base)


def overridden(config: RunConfig, override: str) -> RunConfig:
    key, _, text = override.partition("=")
    first, *rest = {"engine": "engine.name"}.get(key, key).split(".")
    value = yaml.safe_load(text)
    if not rest:
        return replace(config, **{first: value})
    section = getattr(config, first)
    if len(rest) == 2:
        value = {**getattr(section, rest[0]), rest[1]: value}
    changed = replace(section, **{rest[0]: value})
    return replace(config, **{first: changed})


def about_model(config: RunConfig) -> list[Check]:
    return [model(config, HERE, model_gb(config.model.path), local=True)]


def about_options(config: RunConfig) -> list[Check]:
    return list(options(config, model_ok=True))


def about_disk(config: RunConfig) -> list[Check]:
    return list(folders.space(config, model_gb(config.model.path)))


def about_search(config: RunConfig) -> list[Check]:
    return [*doctor._search(config), *services.retriever(config), *services.search_store(config.search)]


def wrong(checks: Iterable[Check]) -> dict[str, Check]:
    """What is not well, by name."""
    found = {c.name: c for c in checks if c.level != "ok"}
    assert all(c.do for c in found.values()), "whatever is wrong says how to mend it"
    return found


# -- the model folder -------------------------------------------------------------------------------------------------


def cut(model: Path) -> None:
    file = model / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1000)


def no_header(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\xff" * 4000)


def lose_shard(model: Path) -> None:
    names = {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def lose_tokenizer(model: Path) -> None:
    for file in model.glob("tokenizer*"):
        file.unlink()


def garble_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text('{"version": ')


def garble_options(model: Path) -> None:
    (model / "config.json").write_text("[]")


def only_pickles(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def odd_options(model: Path) -> None:
    options = json.loads((model / "config.json").read_text())
    del options["max_position_embeddings"]
    (model / "config.json").write_text(json.dumps(options | {"text_config": ["?"]}))
    (model / "tokenizer_config.json").write_text("?")


def endless_shard(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x" * 300}}))


@pytest.mark.parametrize(
    "option", ["out", "model.path", "env.questions", "search.corpus", "search.index", "search.store"]
)
def test_a_name_that_is_too_long_costs_one_line(make_config: MakeConfig, option: str) -> None:
    """It ended the whole command: a script that asks for JSON got none."""
    found = doctor.diagnose(make_config(f"{option}={'x' * 300}"))
    assert any("too long" in check.means for check in found if check.level == "fail")
    assert {"python", "disk", "model", "port 8320", "engine"} <= {check.name for check in found}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (odd_options, "tokenizer_config.json is damaged"),
        (endless_shard, "of the weights are missing"),
        (cut, "cut off or damaged"),
        (no_header, "no header of safetensors"),
        (lose_shard, "model-00002-of-00002.safetensors of the weights are missing"),
        (lose_tokenizer, "no tokenizer"),
        (garble_tokenizer, "tokenizer.json is damaged"),
        (garble_options, "config.json is damaged"),
        (only_pickles, "can run code"),
    ],
)
def test_a_broken_model_folder(
    make_config: MakeConfig, bed: Any, tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    shutil.copytree(bed.model, tmp_path / "model")
    damage(tmp_path / "model")
    found = wrong(about_model(make_config(f"model.path={tmp_path / 'model'}")))
    assert list(found) == ["model"]
    assert said in found["model"].means


def test_positions_and_names_at_the_hub(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = wrong(about_model(make_config("sampling.max_context_tokens=100000")))
    assert "2048 positions" in found["model"].means
    config = make_config("model.path=owner/name")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in wrong(about_model(config))["model"].means
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert wrong(about_model(config))["model"].level == "note"
    (tmp_path / "models--owner--name" / "snapshots" / "1").mkdir(parents=True)
    (tmp_path / "models--owner--name" / "snapshots" / "1" / "config.json").write_text("{}")
    assert not wrong(about_model(config))


# -- configuration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["env.questions=nowhere"], "env.questions"),
        (["env.grammar=nowhere:Grammar"], "cannot import module 'nowhere'"),
        (["reward.name=nothing"], "reward.name=nothing"),
        (["reward.scorer=users_rules:Absent"], "reward.scorer"),
        (["algorithm.credit=users_rules:Absent"], "algorithm.credit"),
        (["algorithm.objective=users_rules:halved"], "algorithm.objective"),
        (["trainer.eval_every=5"], "nothing to validate on"),
        (["env.prompt=nowhere.txt"], "env.prompt"),
        (["search.args.k9=1"], "k9"),
        (["search.index=x", "search.corpus=y"], "leave search.corpus=y out"),
        (["model.lora_rank=4", "engine=vllm", "engine.sync=nccl"], "use engine.sync=folder"),
        (["env.id=nowhere/Nothing-v0"], "nowhere/Nothing-v0"),
    ],
)
def test_what_a_run_would_refuse_at_its_start(make_config: MakeConfig, overrides: list[str], said: str) -> None:
    faults = about_options(make_config(*overrides))
    assert any(said in c.means for c in faults), faults
    assert {c.level for c in faults} == {"fail"}


def test_several_mistakes_are_all_named(make_config: MakeConfig) -> None:
    config = make_config("env.grammar=nowhere:Grammar", "reward.name=nothing", "trainer.eval_every=5")
    assert len(about_options(config)) == 3


def test_options_that_are_no_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    """For scripts, too: the document is whole, and the exit code 1."""
    with pytest.raises(SystemExit) as end:
        run_doctor(["model.pth=x"], as_json=True)
    assert end.value.code == 1
    document = json.loads(capsys.readouterr().out)
    failed = {c["name"]: c for c in document["checks"] if c["level"] == "fail"}
    assert (document["ok"], list(failed)) == (False, ["config"])
    assert "Did you mean 'model.path'" in failed["config"]["means"]
    assert failed["config"]["do"]


def test_colons_are_no_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_doctor(["env.grammar=nowhere:x:y"], as_json=False)
    assert "nowhere:x:y" in capsys.readouterr().out


# -- folders ----------------------------------------------------------------------------------------------------------


def test_a_disk_without_room(make_config: MakeConfig, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        config = make_config(f"out={disk.folder / 'run'}")
        found = wrong(about_disk(config))
        assert "one checkpoint and the trained model take" in found["disk"].means
        disk.fill()
        assert "No space left" in wrong(about_disk(config))["disk"].means
        disk.read_only(True)
        assert "read-only" in wrong(about_disk(config))["disk"].means.lower()


def test_a_place_that_is_no_folder(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "it is a file" in wrong(about_disk(make_config(f"out={tmp_path / 'file' / 'run'}")))["disk"].means


def test_a_run_that_lies_there(make_config: MakeConfig, tmp_path: Path) -> None:
    import torch

    from turntree.trainers.fingerprint import config_fingerprint
    from turntree.trainers.progress import RESUME_KEYS
    from turntree.trainers.run_folder import RunFolder

    config, where = make_config(), f"out={tmp_path / 'run'}"
    run = RunFolder.create(tmp_path / "run", config)
    assert "holds a run already" in wrong(folders.run_folder(make_config(where)))["run folder"].means
    assert not wrong(folders.run_folder(make_config(where, "resume=true")))
    model = torch.nn.Linear(2, 2)
    fingerprint = config_fingerprint(asdict(config), RESUME_KEYS)
    for step in (1, 2):
        save_checkpoint(
            run.checkpoints, step, model=model, optimizer=torch.optim.SGD(model.parameters()), state={},
            fingerprint=fingerprint,
        )  # fmt: skip
    changed = wrong(folders.run_folder(make_config(where, "resume=true", "trainer.learning_rate=1")))["run folder"]
    assert "trainer.learning_rate" in changed.means
    (run.checkpoints / "step-00000002" / "state.json").write_text("{")
    note = wrong(folders.run_folder(make_config(where, "resume=true")))["run folder"]
    assert (note.level, note.means) == ("note", "goes on from step-00000001")
    assert "step-00000002" in note.found


# -- search -----------------------------------------------------------------------------------------------------------


def test_an_index_that_cannot_be_searched(make_config: MakeConfig, bed: Any, tmp_path: Path) -> None:
    folder = tmp_path / "index"
    build_index(bed.world / "corpus.jsonl", folder, kind="bm25")
    (fine,) = about_search(make_config(f"search.index={folder}"))
    assert fine.level == "ok"
    assert "searched in" in fine.found
    file = max((folder / "index").rglob("*"), key=lambda p: p.stat().st_size)
    os.truncate(file, file.stat().st_size - 1)
    found = wrong(about_search(make_config(f"search.index={folder}")))
    assert "bytes, found" in found["index"].means
    assert "--replace" in found["index"].do
    assert "expected a search index" in wrong(about_search(make_config(f"search.index={bed.world}")))["index"].means


def test_retrievers(make_config: MakeConfig, bed: Any, scripted_server: Any, search_server: Callable[..., str]) -> None:
    def asked(url: str, *more: str) -> Check:
        config = make_config("search.backend=http", f"search.args.url={url}", "search.args.timeout_s=1", *more)
        (found,) = about_search(config)
        assert found.level == "ok" or found.do
        return found

    well = search_server(BM25Backend.from_corpus(bed.world / "corpus.jsonl"))
    assert "passages for" in asked(f"{well}/retrieve").means
    other = asked(f"{well}/retrieve", "search.args.fingerprint=0123456789abcdef")
    assert (other.level, "expected the index" in other.means) == ("fail", True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        down = asked(f"http://127.0.0.1:{free.getsockname()[1]}/retrieve")
    assert down.level == "fail"
    assert down.do.startswith("start it")
    for answer, said in (
        ((200, {}, b"<html>hello</html>"), "expected JSON"),
        ((200, {}, {"rows": 3}), "rows"),
        ((404, {}, b"nothing here"), "404"),
        ((401, {}, b"who are you"), "401"),
        ((200, {}, {"result": [[]]}, 1.5), "timeout_s=1"),
    ):
        scripted_server.answers = [answer, answer]
        found = asked(scripted_server.url)
        assert found.level == "fail"
        assert said in found.means, found
    scripted_server.answers, scripted_server.always = [], (200, {}, {"result": [[]]})
    assert asked(scripted_server.url).means.startswith("answers, but finds nothing")
    assert "NO_SUCH_TOKEN" in asked(scripted_server.url, "search.args.token_env=NO_SUCH_TOKEN").means
    assert "no address" in wrong(about_search(make_config("search.backend=http")))["retriever"].means


def test_stores_of_searches(make_config: MakeConfig, tmp_path: Path) -> None:
    replay = ("search.store_mode=replay", "search.store_fingerprint=x")
    absent = wrong(about_search(make_config(f"search.store={tmp_path / 'absent'}", *replay)))["search store"]
    assert "no such file" in absent.means
    (tmp_path / "other").write_text("no database" * 100)
    assert (
        "another file" in wrong(about_search(make_config(f"search.store={tmp_path / 'other'}")))["search store"].means
    )
    SearchStore(tmp_path / "store").close()
    assert not wrong(about_search(make_config(f"search.store={tmp_path / 'store'}")))
    assert (
        "record one first"
        in wrong(about_search(make_config(f"search.store={tmp_path / 'store'}", *replay)))["search store"].do
    )


# -- the machine ------------------------------------------------------------------------------------------------------


def test_ports_that_are_taken(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        monkeypatch.setitem(services.PORTS, "turntree serve", port)
        found = wrong(services.ports(make_config()))[f"port {port}"]
        assert f"(process {os.getpid()})" in found.found
        assert found.do == "turntree serve --port N"
        own = make_config("engine=openai", "engine.model=m", f"engine.base_url=http://127.0.0.1:{port}/v1")
        assert f"port {port}" not in wrong(services.ports(own)), "the run's own server"
    assert f"port {port}" not in wrong(services.ports(make_config()))


def test_the_ports_are_those_of_the_servers() -> None:
    from turntree.search_backend.server import ServerSettings
    from turntree.trainers.studio.serving import DEFAULT_PORT

    assert {"turntree view": DEFAULT_PORT, "turntree serve": ServerSettings().port} == services.PORTS


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "cores", lambda: 8)
    found = {}
    for asked in ("1", "2", "4", "8", "9", "many", "8,1"):
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
        check = machine_checks.threads(None)
        found[asked] = check.level
        assert check.level == "ok" or check.do
    monkeypatch.delenv("OMP_NUM_THREADS")
    found["unset"] = machine_checks.threads(None).level
    assert [asked for asked, level in found.items() if level == "note"] == ["1", "2", "9", "many"]
    assert machine_checks.threads(9).level == "note"
    assert machine_checks.threads(8).level == "ok"


def test_memory_and_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "available_memory", lambda: 10**9)
    assert machine_checks.memory(64.0).level == "note"
    monkeypatch.setattr(machine_checks, "version_of", lambda name: "1.0" if name == "torch" else "")
    core = next(machine_checks.packages())
    assert core.level == "fail"
    assert "torch 1.0 (supported" in core.found
    assert "numpy is missing" in core.found
    assert core.do
