"""Generation by a running vLLM server: token ids in and out over HTTP, and weights taken in place."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx2

from turntree.agents.engines.endpoint import Endpoint, Usage
from turntree.agents.engines.protocol import Generation, Prefix, Request, SamplingParams, check_requests
from turntree.agents.engines.transport import Transport
from turntree.agents.engines.vllm import Publish, VLLMStats, check_published, publish_folder
from turntree.agents.engines.vllm_request import make_generation, sampling_arguments, topk_entropy
from turntree.agents.tokenizer import Tokenizer, decode, encode, end_ids
from turntree.errors import ConfigError, EngineError

__all__ = ["VLLMServerEngine"]

T = TypeVar("T")

_HOW = "start it with `python -m vllm.entrypoints.openai.api_server --logprobs-mode processed_logprobs ...`"


class VLLMServerEngine:
    """Samples through ``/v1/completions`` of the server at ``base_url`` (its address up to ``/v1``).

    The first generation asks the server what it can do, and refuses it with the reason unless it returns token ids,
    log-probs at the sampling temperature and stop strings, and honours seeds. ``max_concurrent_requests`` are in
    flight; one that gets no answer is tried ``retries`` times more. When the consumer stops, connections are closed,
    upon which the server drops what it was generating.

    :meth:`update_weights` needs a server with ``VLLM_SERVER_DEV_MODE=1`` that sees the same ``sync_folder``: turns in
    flight end first, then the weights that ``publish(folder)`` wrote are loaded in place. Only one trainer may use such
    a server, and one that was restarted since, which has other weights than the trainer's, is refused. ``model`` is the
    served name ('' : the first one that the server lists).
    """

    def __init__(
        self,
        base_url: str,
        tokenizer: Tokenizer,
        *,
        model: str = "",
        max_context_tokens: int | None = None,
        stop_ids: frozenset[int] | None = None,
        publish: Publish | None = None,
        sync_folder: str | Path | None = None,
        max_concurrent_requests: int = 64,
        entropy_topk: int = 0,
        timeout_s: float = 600.0,
        retries: int = 3,
        version: int = 0,
    ) -> None:
        if not base_url:
            raise ConfigError("engine.base_url is empty: expected an address such as http://127.0.0.1:8000/v1")
        self.base_url = base_url.rstrip("/")
        self.tokenizer = tokenizer
        self.max_context_tokens = max_context_tokens
        self.entropy_topk = entropy_topk
        self.stats = VLLMStats()
        self._limits: dict[str, Any] = {
            "concurrency": max_concurrent_requests,
            "timeout_s": timeout_s,
            "retries": retries,
        }
        self._model = model
        self._end_ids = end_ids(tokenizer) if stop_ids is None else stop_ids
        self._publish, self._sync_folder = publish, sync_folder
        self._version = version
        self._open: Transport | None = None
        self._probed = False
        self._broken = ""
        self._instance = ""  # of the server that took the weights; a restarted one has another
        self._lock = threading.RLock()
        self._gate = threading.Condition()
        self._running, self._taking = 0, False  # turns in flight; weights on their way
        Endpoint(self.base_url, "any", **self._limits)  # options out of range are refused now

    # Generation ----------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Version of the weights in use."""
        return self._version

    @property
    def in_flight(self) -> int:
        """Requests that may be under way at the same time, each asked for by a thread of its own."""
        return int(self._limits["concurrency"])

    def abandon(self) -> None:
        """Start no further try of the requests that are under way in other threads."""
        if self._open is not None:
            self._open.abandon()

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """One generation a request, in the same order. Raises ``EngineError`` when the server cannot."""
        replies = dict(self.as_completed(requests))
        found = [replies[i] for i in range(len(requests))]
        for reply in found:
            if isinstance(reply, EngineError):
                raise reply
        return [reply for reply in found if isinstance(reply, Generation)]

    def as_completed(self, requests: Sequence[Request]) -> Generator[tuple[int, Generation | EngineError], None, None]:
        """(index of the request, its generation or its error) as they end; what is left is dropped when the consumer
        stops. Raises ``EngineError`` in the place of the last one when the server was restarted meanwhile: all of them
        may come from other weights then.
        """
        check_requests(requests, max_context_tokens=self.max_context_tokens)
        self.probe()
        return self._stream([self._call(request) for request in requests])

    def _stream(self, calls: Sequence[Callable[[], T]]) -> Generator[tuple[int, T | EngineError], None, None]:
        outcomes = self._transport().map(calls)
        left, answered = len(calls), 0
        try:
            for index, outcome in outcomes:
                left -= 1
                answered += not isinstance(outcome, EngineError)
                if not left and answered:
                    self._check_instance()
                yield index, outcome
        finally:
            if left:
                self.close()  # closed connections end what is in flight, here and at the server

    def _body(self, request: Request, *, entropy_topk: int) -> dict[str, Any]:
        arguments = sampling_arguments(
            request.params, seed=request.seed, end_ids=self._end_ids, entropy_topk=entropy_topk
        )
        return {
            **{key: value for key, value in arguments.items() if value is not None},
            "model": self._model,
            "prompt": request.prefix.token_ids(),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "add_special_tokens": False,
            # What older weights computed stays out of reach, whatever becomes of the cache itself.
            "cache_salt": f"turntree-{self._version}",
        }

    def _call(self, request: Request) -> Callable[[], Generation]:
        self._body(request, entropy_topk=self.entropy_topk)  # what the server would change is refused now
        tokens = len(request.prefix) + request.params.max_tokens

        def call() -> Generation:
            with self._turn() as version:
                body = self._body(request, entropy_topk=self.entropy_topk)
                return self._transport().post(
                    "completions",
                    body,
                    read=lambda document, usage: self._generation(request, document["choices"][0], usage, version),
                    tokens=tokens,
                    guess=lambda _: Usage(),
                )

        return call

    @contextlib.contextmanager
    def _turn(self) -> Iterator[int]:
        """The version that a turn starts and ends under, all its tries: none runs while weights are on their way."""
        with self._gate:
            self._gate.wait_for(lambda: not self._taking)
            self._check_known()
            self._running += 1
            version = self._version
        try:
            yield version
        finally:
            with self._gate:
                self._running -= 1
                self._gate.notify_all()

    @contextlib.contextmanager
    def _standstill(self) -> Iterator[None]:
        """Turns in flight have ended, and those that wait here start afterwards."""
        with self._gate:
            self._gate.wait_for(lambda: not self._taking)
            self._taking = True
            self._gate.wait_for(lambda: not self._running)
        try:
            yield
        finally:
            with self._gate:
                self._taking = False
                self._gate.notify_all()

    def _generation(self, request: Request, choice: Mapping[str, Any], usage: Usage, version: int) -> Generation:
        if choice.get("token_ids") is None or not choice.get("logprobs"):
            raise EngineError(f"the server returned no token ids or no log-probs, found {sorted(choice)}; {_HOW}")
        ids, found = choice["token_ids"], choice["logprobs"]
        with self._lock:
            self.stats.generated_tokens += len(ids)
            self.stats.prefilled_tokens += len(request.prefix) - usage.cached_tokens
            self.stats.reused_tokens += usage.cached_tokens
        rows = found.get("top_logprobs") or ()
        return make_generation(
            request,
            ids=ids,
            logprobs=found["token_logprobs"],
            reason=choice.get("finish_reason"),
            stop=choice.get("stop_reason"),
            version=version,
            entropies=[self._entropy(row) for row in rows] if self.entropy_topk else (),
            metrics={"cached_tokens": float(usage.cached_tokens)},
        )

    def _entropy(self, row: Mapping[str, float]) -> float:
        # The sampled token comes along even when it is not among the most likely ones.
        return topk_entropy(sorted(row.values(), reverse=True)[: self.entropy_topk])

    # What the server can do ----------------------------------------------------------------------------------------

    def probe(self) -> None:
        """Ask the server, once, whether it can be trained on. Raises ``EngineError`` with the reason if not."""
        self._check_known()
        with self._lock:
            if self._probed:
                return
            if not self._model:
                self._model = str(self._get(f"{self.base_url}/models")["data"][0]["id"])
            self._check_logprobs()
            self._check_seeds_and_stops()
            self._probed = True

    def _check_known(self) -> None:
        if self._broken:
            raise EngineError(
                f"the server's weights are unknown since {self._broken}; start it and the run again (resume=true goes "
                "on)"
            )

    def _ask(self, params: SamplingParams, *, seed: int) -> Generation:
        return self._call(Request(_probe_prefix(self.tokenizer), params, seed, ("probe",)))()

    def _check_logprobs(self) -> None:
        """Doubling the temperature must halve the distances between log-probs."""
        plain, hot = self._likely(1.0), self._likely(2.0)
        both = sorted(plain.keys() & hot.keys(), key=plain.__getitem__)
        if len(both) < 2 or plain[both[-1]] - plain[both[0]] < 1e-3:
            return  # so flat a distribution is the same at any temperature
        ratio = (hot[both[-1]] - hot[both[0]]) / (plain[both[-1]] - plain[both[0]])
        if abs(ratio - 0.5) > 0.1:
            raise EngineError(
                "the server's log-probs are those before the sampling temperature (raw_logprobs): doubling it scales "
                f"the distances between them by {ratio:.2f}, expected 0.5; {_HOW}"
            )

    def _likely(self, temperature: float) -> Mapping[str, float]:
        """Log-probs of the most likely tokens after a fixed prompt."""
        request = Request(_probe_prefix(self.tokenizer), SamplingParams(1, temperature), 0, ("probe",))
        found: list[Mapping[str, float]] = []

        def read(document: Mapping[str, Any], usage: Usage) -> None:
            del usage
            found.extend(document["choices"][0]["logprobs"]["top_logprobs"])

        body = self._body(request, entropy_topk=5)
        self._transport().post("completions", body, read=read, tokens=20, guess=lambda _: Usage())
        return found[0]

    def _check_seeds_and_stops(self) -> None:
        params = SamplingParams(12, 1.0)
        first, again, other = (self._ask(params, seed=seed) for seed in (3, 3, 4))
        if first.ids != again.ids or (len(first.ids) > 4 and first.ids == other.ids):
            raise EngineError("the server ignores seeds: equal seeds gave different ids, or different ones the same")
        text = decode(self.tokenizer, first.ids[:4]).strip()
        if text and "\ufffd" not in text:
            stopped = self._ask(SamplingParams(12, 1.0, stop=(text[-1],)), seed=3)
            if text[-1] not in decode(self.tokenizer, stopped.ids) or stopped.finish_reason != "stop":
                raise EngineError("the server does not stop at stop strings, or strips them from the token ids")

    # Weights -------------------------------------------------------------------------------------------------------

    def update_weights(self, version: int) -> None:
        """Take the trainer's weights as ``version`` once the turns in flight have ended; cached prefixes are dropped.

        Raises ``ConfigError`` when the server cannot (no development mode) and ``EngineError`` when it does not answer,
        before anything was changed; ``EngineError`` when it failed half-way: the engine then refuses to generate.
        """
        if self._publish is None:
            raise ConfigError("this engine cannot take weights: make it with publish")
        with self._standstill(), self._lock:
            instance = self._check_dev_mode()
            started = time.monotonic()
            try:
                self._post("/pause", params={"mode": "wait"})
                with publish_folder(self._publish, self._sync_folder) as folder:
                    folder.chmod(0o755)  # the server may be another user's
                    check_published(folder, packed=False)  # what is served was checked above
                    call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
                    self._post("/collective_rpc", json=call)
                if self._post("/reset_prefix_cache").get("success") is False:
                    raise EngineError("the server did not drop its prefix cache")
                self._post("/resume")
            except Exception as error:
                self._broken = f"taking version {version} failed ({error})"
                raise EngineError(f"{self.base_url}: {self._broken}") from error
            self._version, self._instance = version, instance
            self.stats.syncs += 1
            self.stats.sync_seconds = time.monotonic() - started

    def _check_instance(self) -> None:
        """Refuse a server that was started again since it took the weights: it has those of its folder."""
        if self._instance and (found := _instance(self._server_config())) != self._instance:
            self._broken = f"it was restarted after it took version {self._version} ({self._instance}, now {found})"
            raise EngineError(f"{self.base_url}: {self._broken}")

    def _server_config(self) -> Mapping[str, Any]:
        config = self._get(f"{self._root}/server_info?config_format=json").get("vllm_config")
        return config if isinstance(config, dict) else {}

    def _check_dev_mode(self) -> str:
        """Refuse a server that cannot take weights; else which one it is."""
        self._get(f"{self.base_url}/models")  # one that does not answer at all is another matter
        try:
            self._get(f"{self._root}/is_paused")
            config = self._server_config()
        except EngineError as error:
            raise ConfigError(
                "the server takes no weights: start it with VLLM_SERVER_DEV_MODE=1, on an address that only the "
                f"trainer reaches ({error})"
            ) from error
        if "cpu" in str(config.get("device_config")):
            served = Path(str((config.get("model_config") or {}).get("model")))
            if not served.is_dir():
                raise ConfigError(
                    f"the server runs {str(served)!r} on CPU, and no such folder is here to look into; serve a folder "
                    "written by turntree.agents.models.save_weights(..., untie=True)"
                )
            check_published(served, packed=True)
            if (config.get("scheduler_config") or {}).get("enable_chunked_prefill"):
                raise ConfigError(
                    "the server prefills long prompts in parts, which kills it on CPU when requests have seeds: start "
                    "it with --no-enable-chunked-prefill"
                )
        return _instance(config)

    @property
    def _root(self) -> str:
        return self.base_url.removesuffix("/v1")

    # HTTP ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the connections; a later generation opens new ones."""
        with self._lock:
            transport, self._open = self._open, None
        if transport is not None:
            transport.close()

    def _transport(self) -> Transport:
        with self._lock:
            if self._open is None:
                self._open = Transport(Endpoint(self.base_url, self._model or "any", **self._limits))
            return self._open

    def _get(self, url: str) -> dict[str, Any]:
        return _json("GET", url, timeout_s=30.0)

    def _post(self, path: str, **content: Any) -> dict[str, Any]:
        return _json("POST", self._root + path, timeout_s=float(self._limits["timeout_s"]), **content)


def _instance(config: Mapping[str, Any]) -> str:
    """What tells a server's process from the next one's."""
    return str(config.get("instance_id", ""))


def _json(method: str, url: str, *, timeout_s: float, **content: Any) -> dict[str, Any]:
    """One call of the server's own interface; not repeated, since each changes its state."""
    try:
        response = httpx2.request(method, url, timeout=timeout_s, trust_env=False, **content)
    except httpx2.HTTPError as error:
        raise EngineError(f"{url}: {type(error).__name__}: {error}") from error
    if response.status_code != 200:
        raise EngineError(f"{url} answered status {response.status_code}: {response.text[:300]}")
    try:
        document = response.json()
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _probe_prefix(tokenizer: Tokenizer) -> Prefix:
    return Prefix(encode(tokenizer, "One two three four five six seven"))
