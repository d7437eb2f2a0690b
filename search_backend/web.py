"""A search API of the web as a backend: one request a query, its address and fields as configured.

What the web answers changes from day to day, so a run that is to be repeated puts a
:class:`~turntree.search_backend.replay.ReplayBackend` in front (``search.store``).
"""

from __future__ import annotations

import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from turntree import __version__
from turntree.errors import ConfigError
from turntree.http import check_address, secret_from
from turntree.search_backend.client import check_queries, json_value
from turntree.search_backend.passage import Passage
from turntree.search_backend.transport import Answer, Limits, Sender, Unreadable

__all__ = ["STYLES", "WebBackend", "WebSettings"]

_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")


@dataclass(frozen=True, slots=True)
class WebSettings:
    """A search API.

    ``url``: its whole address. ``key_env`` is the *name* of the environment variable that holds the key ('' : none is
    sent), which goes into the header ``key_header``, or, where an API wants it there, the parameter ``key_field``.
    ``query_field`` and ``count_field`` ('' : not sent) are names in the JSON body of a POST or in the address of a GET;
    ``fields`` are further ones. ``results``: dotted path to the list of results ('' : the answer itself is the list);
    ``title``, ``text``, ``id``: dotted paths in one of them. ``max_count``: the most that is asked for at once.
    ``user_agent``: who asks; services such as Wikipedia refuse requests without a name and an address to write to.

    Raises ``ConfigError`` for values out of range.
    """

    url: str
    method: Literal["POST", "GET"] = "POST"
    key_env: str = ""
    key_header: str = "Authorization"
    key_field: str = ""
    query_field: str = "q"
    count_field: str = ""
    max_count: int = 100
    fields: Mapping[str, Any] = field(default_factory=dict)
    results: str = "results"
    title: str = "title"
    text: str = "snippet"
    id: str = "link"
    user_agent: str = f"turntree/{__version__}"
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        check_address(self.url, what="url", example="https://HOST/search")
        if self.method not in ("POST", "GET"):
            raise ConfigError(f"method={self.method!r}: expected POST or GET")
        for name in ("query_field", "title", "text", "user_agent"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is empty: expected a name")
        taken = {self.query_field, self.count_field, self.key_field} & self.fields.keys()
        if taken:
            raise ConfigError(f"fields.{sorted(taken)[0]} is sent by the backend itself; leave it out of fields")


STYLES: dict[str, dict[str, Any]] = {
    "generic": {},
    "serper": {"key_header": "X-API-KEY", "count_field": "num", "results": "organic"},
    "serpapi": {"method": "GET", "key_field": "api_key", "count_field": "num", "results": "organic_results"},
    "brave": {
        "method": "GET", "key_header": "X-Subscription-Token", "count_field": "count", "max_count": 20,
        "results": "web.results", "text": "description", "id": "url",
    },
    "searxng": {"method": "GET", "fields": {"format": "json"}, "text": "content", "id": "url"},
    "mediawiki": {
        "method": "GET", "query_field": "srsearch", "count_field": "srlimit", "results": "query.search", "id": "pageid",
        "fields": {"action": "query", "list": "search", "format": "json", "formatversion": "2"},
    },
}  # fmt: skip
"""What the settings are for known kinds of APIs."""


class WebBackend:
    """A web search API; a :class:`SearchBackend`.

    ``style`` names a preset in :data:`STYLES`; other keyword arguments are fields of :class:`WebSettings` and
    :class:`Limits` and come before it. The fingerprint is that of the settings, without the key: it says which engine
    was asked, not that it answers the same tomorrow. Markup in titles and texts is removed.
    """

    def __init__(self, url: str, *, style: str = "generic", **options: Any) -> None:
        if style not in STYLES:
            raise ConfigError(f"style={style!r}: expected one of {', '.join(STYLES)}")
        bounds = {name: options.pop(name) for name in list(options) if name in Limits.__dataclass_fields__}
        unknown = sorted(options.keys() - WebSettings.__dataclass_fields__.keys())
        if unknown:
            known = sorted(WebSettings.__dataclass_fields__.keys() | Limits.__dataclass_fields__.keys())
            raise ConfigError(f"unknown option {unknown[0]!r} of the web backend; expected one of {', '.join(known)}")
        preset = dict(STYLES[style])
        preset["fields"] = {**preset.get("fields", {}), **(options.pop("fields", None) or {})}
        limits = options.pop("limits", None) or Limits(**bounds)
        self.settings = WebSettings(url, **{**preset, **options, "limits": limits})
        self._start()

    def _start(self) -> None:
        settings = self.settings
        self._key = secret_from(settings.key_env, what=f"the key of {settings.url}")
        headers = {"Accept": "application/json", "User-Agent": settings.user_agent}
        if self._key and not settings.key_field:
            bearer = settings.key_header.lower() == "authorization"
            headers[settings.key_header] = f"Bearer {self._key}" if bearer else self._key
        self._sender = Sender(
            settings.limits, what=f"the search API at {settings.url}", headers=headers, secrets=[self._key]
        )

    @property
    def stats(self) -> Mapping[str, int]:
        """How often it was asked, had to ask again, gave up, or did not ask since it refuses."""
        return dict(self._sender.stats)

    @property
    def in_flight(self) -> int:
        """Searches that may run at the same time, from several threads."""
        return self.settings.limits.concurrency

    @property
    def fingerprint(self) -> str:
        """``web:`` and a hash of everything that is asked, the key excepted."""
        about = {name: value for name, value in asdict(self.settings).items() if name not in _NOT_ASKED}
        return "web:" + hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
        """Up to ``k`` results of each query, in the API's order and without scores; equal queries are asked once.

        Raises :class:`~turntree.errors.RetrievalError`.
        """
        check_queries(queries, k)
        unique = list(dict.fromkeys(queries))
        if len(unique) <= 1:
            lists = [self._ask(query, k) for query in unique]
        else:
            with ThreadPoolExecutor(min(len(unique), self.settings.limits.concurrency), "web") as pool:
                lists = list(pool.map(lambda query: self._ask(query, k), unique))
        found = dict(zip(unique, lists, strict=True))
        return [list(found[query]) for query in queries]

    def close(self) -> None:
        """Close the connections; further searches raise :class:`~turntree.errors.RetrievalError`."""
        self._sender.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": self.settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.settings = state["settings"]
        self._start()

    def _ask(self, query: str, k: int) -> list[Passage]:
        settings = self.settings
        asked: dict[str, Any] = {**settings.fields, settings.query_field: query}
        if settings.count_field:
            asked[settings.count_field] = min(k, settings.max_count)
        if self._key and settings.key_field:
            asked[settings.key_field] = self._key

        def read(answer: Answer) -> list[Passage]:
            return _passages(json_value(answer.content), settings)[:k]

        if settings.method == "GET":
            return self._sender.send("GET", settings.url, read, params=asked)
        return self._sender.send("POST", settings.url, read, body=asked)


_NOT_ASKED = ("limits", "key_env", "user_agent")


def _passages(answer: Any, settings: WebSettings) -> list[Passage]:
    if isinstance(answer, Mapping) and answer.get("error"):
        raise Unreadable(f"expected results, found the error {answer['error']!r:.200}")
    found = _at(answer, settings.results) if settings.results else answer
    if found is None and isinstance(answer, Mapping):
        # APIs leave the list out where nothing was found; an answer that is anything else at all must not pass as that.
        if not _says_nothing_found(answer, settings.results):
            raise Unreadable(f"expected results under {settings.results!r}, found the keys {sorted(answer)!r:.200}")
        return []
    if not isinstance(found, list):
        raise Unreadable(f"expected a list of results under {settings.results!r}, found {answer!r:.200}")
    passages = [_passage(result, settings) for result in found]
    return [passage for passage in passages if passage.title or passage.text]


def _says_nothing_found(answer: Mapping[str, Any], results: str) -> bool:
    """Whether the answer is about a search: it echoes its parameters, or is the object that the list would be in."""
    echoes = ("searchParameters", "search_parameters", "search_metadata", "query", "searchInformation")
    return any(name in answer for name in (*echoes, results.partition(".")[0]))


def _passage(result: Any, settings: WebSettings) -> Passage:
    if not isinstance(result, Mapping):
        raise Unreadable(f"expected an object as a result, found {result!r:.200}")
    title, text = (_text(_at(result, path), path) for path in (settings.title, settings.text))
    name = _at(result, settings.id) if settings.id else None
    if name is None or name == "":
        name = "sha256:" + hashlib.sha256(f"{title}\n{text}".encode("utf-8", "replace")).hexdigest()[:16]
    return Passage(str(name), " ".join(title.splitlines()), text)


def _at(value: Any, path: str) -> Any:
    """What a dotted path leads to; numbers are places in lists. None where it leads nowhere."""
    for part in path.split("."):
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value


def _text(value: Any, path: str) -> str:
    if value is None:
        return ""
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        value = " ".join(value)
    if not isinstance(value, str):
        raise Unreadable(f"expected a text under {path!r}, found {value!r:.200}")
    return html.unescape(_TAG.sub("", value)).strip()
