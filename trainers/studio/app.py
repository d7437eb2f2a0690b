"""The studio's web application: a page, and what it asks for as JSON."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any

import turntree.trainers.studio
from turntree.errors import DataError, MissingExtraError, TurnTreeError
from turntree.trainers.report.explain import built_in_rules, explain_trees
from turntree.trainers.report.viewer import render_tree_html
from turntree.trainers.studio.data import Library, Run, tree_view
from turntree.trainers.studio.guard import Guard
from turntree.trainers.studio.scan import occurrences, search
from turntree.trainers.studio.tokens import TokenReader, token_view

try:
    from fastapi import FastAPI, Query, Request, Response
    from fastapi.exceptions import RequestValidationError
    from pydantic import BaseModel, Field
except ImportError as error:  # pragma: no cover
    raise MissingExtraError(
        f"the tree studio needs the extra: pip install 'turntree[studio]' ({error}); "
        "`turntree view RUN --html FILE` draws one tree without it"
    ) from error

__all__ = ["Studio", "create_app"]

_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_TEXT = 20_000

RunName = Annotated[str, Query(max_length=1000)]
Step = Annotated[int, Query(ge=0)]
Index = Annotated[int, Query(ge=0)]
NodeName = Annotated[str, Query(pattern=r"^(root|\d{1,9}(\.\d{1,9})*)$", max_length=_TEXT)]


class Place(BaseModel):
    """A stored node, and turns played after it."""

    run: str = Field(max_length=1000)
    step: int = Field(ge=0)
    index: int = Field(ge=0)
    node: str = Field(pattern=r"^(root|\d{1,9}(\.\d{1,9})*)$", max_length=_TEXT)
    turns: list[Annotated[str, Field(max_length=_TEXT)]] = Field(default_factory=list, max_length=64)


class Played(Place):
    """A turn to play."""

    text: str = Field(max_length=_TEXT)


class Sampled(Place):
    """A turn to sample."""

    seed: int = Field(ge=0, lt=2**63)
    temperature: float = Field(default=1.0, ge=0.0, le=2.0)


@dataclass
class Studio:
    """What the application answers with. ``fork=False`` shows without playing; ``model``: the folder that samples."""

    library: Library
    fork: bool = True
    model: Path | None = None
    _desks: dict[str, Any] = field(default_factory=dict)
    _readers: dict[str, tuple[TokenReader | None]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, name: str) -> Run:
        return self.library.run(name)

    def desk(self, run: Run) -> Any:
        """Where forks of a run are played; made on first use."""
        from turntree.trainers.studio.fork import ForkDesk

        if not self.fork:
            raise DataError("this studio was started with --no-fork")
        with self._lock:
            return self._desks.setdefault(run.name, ForkDesk(run.folder, model=self.model))

    def reader(self, run: Run) -> TokenReader | None:
        """The run's tokenizer, looked for again until there is one: a training run writes it at its end."""
        with self._lock:
            kept = self._readers.get(run.name)
        if kept is not None:
            return kept[0]
        model = run.config().get("model")
        configured = str(model.get("path") or "") if isinstance(model, Mapping) else ""
        found = TokenReader.of(run.folder, configured, self.model)
        if found is not None:
            with self._lock:
                self._readers[run.name] = (found,)
        return found


def create_app(
    studio: Studio, *, key: str, cookie: str = "turntree_studio", hosts: frozenset[str] = frozenset()
) -> Any:
    """The ASGI application behind its :class:`Guard`."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(TurnTreeError, _failed)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(404, _missing)
    _add_pages(app)
    _add_reading(app, studio)
    _add_exports(app, studio)
    _add_forking(app, studio)
    return Guard(app, key, cookie, hosts)


def _failed(request: Request, error: Exception) -> Response:
    del request
    status = 404 if isinstance(error, DataError) else 409
    return _json({"error": type(error).__name__, "message": str(error)}, status=status)


def _invalid(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return _json({"error": "InvalidRequest", "message": f"{where}: {first['msg']}"}, status=422)


def _missing(request: Request, error: Exception) -> Response:
    del error
    return _json({"error": "NotFound", "message": f"nothing at {request.url.path}"}, status=404)


def _json(value: Any, *, status: int = 200) -> Response:
    """JSON that is always UTF-8: half of a surrogate pair, from somebody's data, is escaped."""
    try:
        body = json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (UnicodeEncodeError, ValueError):
        body = json.dumps(_finite(value)).encode()
    return Response(body, status_code=status, media_type="application/json")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, (list, tuple)) else value


# The page -------------------------------------------------------------------------------------------------------------


def _add_pages(app: FastAPI) -> None:
    assets = {f"/static/{name}": entry for name, entry in _assets(files(turntree.trainers.studio).joinpath("static"))}

    def page() -> Response:
        return Response(assets["/static/index.html"].read_bytes(), media_type=_KINDS[".html"])

    def asset(request: Request) -> Response:
        # Looked up among the packaged files: no path is ever made of what a request says.
        found = assets.get(request.url.path)
        if found is None:
            return _missing(request, KeyError())
        return Response(found.read_bytes(), media_type=_KINDS[Path(found.name).suffix])

    app.add_api_route("/", page, methods=["GET"])
    app.add_api_route("/static/{path:path}", asset, methods=["GET"])


def _assets(folder: Traversable, below: str = "") -> list[tuple[str, Traversable]]:
    found: list[tuple[str, Traversable]] = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _assets(entry, f"{below}{entry.name}/")
        elif Path(entry.name).suffix in _KINDS:
            found.append((f"{below}{entry.name}", entry))
    return found


# Reading --------------------------------------------------------------------------------------------------------------


def _add_reading(app: FastAPI, studio: Studio) -> None:
    def runs() -> Response:
        now = time.time()
        rules = sorted(built_in_rules())
        about = [run.about(now) for run in studio.library.runs()]
        unreadable = studio.library.unreadable()
        root = str(studio.library.root)
        return _json({"root": root, "fork": studio.fork, "rules": rules, "runs": about, "unreadable": unreadable})

    def steps(run: RunName) -> Response:
        found = studio.run(run)
        return _json({"live": found.live(time.time()), "steps": found.steps()})

    def trees(run: RunName, step: Step) -> Response:
        return _json({"step": step, "trees": [asdict(tree) for tree in studio.run(run).summaries(step)]})

    def tree(run: RunName, step: Step, index: Index) -> Response:
        return _json(tree_view(studio.run(run).step(step), index))

    def tokens(run: RunName, step: Step, index: Index, node: NodeName) -> Response:
        found = studio.run(run)
        return _json(token_view(found, step, index, node, studio.reader(found)))

    def explain(run: RunName, step: Step, index: Index, credit: Annotated[str, Query(max_length=100)] = "") -> Response:
        found = studio.run(run)
        if credit and credit not in built_in_rules():  # an import path would run code of the asker's choice
            raise DataError(f"there is no built-in credit rule {credit!r}")
        members, at = found.step(step).group(index)
        text = explain_trees(members, found.folder.path, credit=credit or None, arguments={}, index=at)
        return _json({"text": text})

    def look(
        run: RunName, q: Annotated[str, Query(min_length=1, max_length=500)], before: int | None = None
    ) -> Response:
        return _json(search(studio.run(run), q, before=before))

    def same(run: RunName, step: Step, index: Index, before: int | None = None) -> Response:
        found = studio.run(run)
        trees = found.summaries(step)
        if index >= len(trees):
            raise DataError(f"step {step} holds trees 0 to {len(trees) - 1}, found {index}")
        return _json(occurrences(found, trees[index].key, before=before))

    routes: dict[str, Callable[..., Response]] = {
        "runs": runs, "steps": steps, "trees": trees, "tree": tree, "tokens": tokens, "explain": explain,
        "search": look, "same": same,
    }  # fmt: skip
    for name, route in routes.items():
        app.add_api_route(f"/api/{name}", route, methods=["GET"])


def _add_exports(app: FastAPI, studio: Studio) -> None:
    def as_json(run: RunName, step: Step, index: Index) -> Response:
        row = studio.run(run).step(step).row(index)
        body = json.dumps(row, ensure_ascii=True, indent=1).encode()
        return _download(body, "application/json", f"tree-step{step}-{index}.json")

    def as_html(run: RunName, step: Step, index: Index) -> Response:
        stored = studio.run(run).step(step).stored(index)
        title = f"Rollout tree of step {step}"
        html = render_tree_html(stored.tree, advantages=stored.advantages, title=title)
        return _download(html.encode(), "text/html; charset=utf-8", f"tree-step{step}-{index}.html")

    app.add_api_route("/api/export/json", as_json, methods=["GET"])
    app.add_api_route("/api/export/html", as_html, methods=["GET"])


def _download(body: bytes, kind: str, name: str) -> Response:
    """Always an attachment: opened in place, a document would run under this server's origin."""
    return Response(body, media_type=kind, headers={"content-disposition": f'attachment; filename="{name}"'})


# Forking --------------------------------------------------------------------------------------------------------------


def _add_forking(app: FastAPI, studio: Studio) -> None:
    def about(run: RunName) -> Response:
        return _json(studio.desk(studio.run(run)).describe())

    def resume(place: Place) -> Response:
        run = studio.run(place.run)
        return _json(studio.desk(run).prompt(run.step(place.step).stored(place.index), place.node, place.turns))

    def play(turn: Played) -> Response:
        run = studio.run(turn.run)
        stored = run.step(turn.step).stored(turn.index)
        return _json(studio.desk(run).play(stored, turn.node, turn.turns, turn.text))

    def sample(ask: Sampled) -> Response:
        run = studio.run(ask.run)
        stored = run.step(ask.step).stored(ask.index)
        desk = studio.desk(run)
        return _json(desk.sample(stored, ask.node, ask.turns, seed=ask.seed, temperature=ask.temperature))

    app.add_api_route("/api/fork", about, methods=["GET"])
    app.add_api_route("/api/fork/resume", resume, methods=["POST"])
    app.add_api_route("/api/fork/play", play, methods=["POST"])
    app.add_api_route("/api/fork/sample", sample, methods=["POST"])
